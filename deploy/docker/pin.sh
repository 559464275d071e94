#!/usr/bin/env bash
# The ranges in pyproject.toml -> constraints.txt: one version of each package that the image has. Downloads no package,
# only what they say of themselves. Run it from anywhere with a Python of the image's version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"${PYTHON:-python3.11}" -m pip install --quiet --dry-run --ignore-installed --only-binary=:all: --report "$report" \
    "../..[postgres,otel]" s3fs setuptools "torch==2.13.0"
{
    echo "# Written by deploy/docker/pin.sh. Where torch is the build for GPUs it names the versions of CUDA it wants."
    "${PYTHON:-python3.11}" - "$report" <<'PYTHON'
import json
import sys

packages = [item["metadata"] for item in json.load(open(sys.argv[1]))["install"]]
for name, version in sorted((p["name"].lower(), p["version"]) for p in packages if p["name"] != "paceline"):
    print(f"{name}=={version.partition('+')[0]}")
PYTHON
} >constraints.txt.new
mv constraints.txt.new constraints.txt
