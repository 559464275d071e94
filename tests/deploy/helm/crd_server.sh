#!/usr/bin/env bash
# FOLDER -> FOLDER/apiextensions-apiserver: Kubernetes' own server of custom resources, built from Debian's packages of its
# source and of Go. Nothing is installed on the system. Takes about 330 MB of downloads and eight minutes of one core,
# once; run again it does what is left to do.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
server=$folder/apiextensions-apiserver
if [ -x "$server" ]; then exit 0; fi

# A private view of Debian unstable, from the mirror that this system uses: the release with these packages.
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -v security | head -n 1)
mkdir -p "$folder"/apt/{lists,cache} "$folder/packages" "$folder/root"
echo "deb $mirror sid main" >"$folder/apt/sources.list"
options=(
    -o Dir::Etc::sourcelist="$folder/apt/sources.list" -o Dir::Etc::sourceparts=-
    -o Dir::State::lists="$folder/apt/lists" -o Dir::Cache="$folder/apt/cache" -o Dir::State::status=/dev/null
    -o APT::Install-Recommends=0 -o APT::Sandbox::User=root
)
if [ ! -e "$folder/unpacked" ]; then
    apt-get "${options[@]}" --quiet update
    go=$(apt-cache "${options[@]}" pkgnames golang-1. | grep -E '^golang-1\.[0-9]+-go$' | sort -V | tail -n 1)
    wanted=$(apt-get "${options[@]}" --simulate install golang-k8s-apiextensions-apiserver-dev "$go" |
        awk '/^Inst/ {print $2}' | grep '^golang')
    # shellcheck disable=SC2086  # a list of names
    (cd "$folder/packages" && apt-get "${options[@]}" --quiet download $wanted)
    for package in "$folder"/packages/*.deb; do dpkg-deb --extract "$package" "$folder/root"; done
    rm -rf "$folder/packages"
    touch "$folder/unpacked"
fi

GOROOT=$(find "$folder/root/usr/lib" -maxdepth 1 -name 'go-1.*' | sort -V | tail -n 1)
export GOROOT GOPATH=$folder/root/usr/share/gocode GOCACHE=$folder/go-cache
export GO111MODULE=off GOPROXY=off GOTOOLCHAIN=local CGO_ENABLED=0
cd "$GOPATH/src/k8s.io/apiextensions-apiserver"
"$GOROOT/bin/go" build -o "$server.partial" .
mv "$server.partial" "$server"
