"""tests/*.py helpers -> importable by their bare names, without tests/ on the module path.

With tests/ on the path its folders would be importable as `cluster`, `kernels` and so on, and `kernels` is a PyPI
package that transformers looks for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, Triton's kernels run in its interpreter; Triton must find this when it is imported, and torch may do that.
    os.environ.setdefault("TRITON_INTERPRET", "1")

for _name in (
    "bundled",
    "oracle",
    "harness",
    "processes",
    "scheduling",
    "scripted_gateway",
    "training_data",
    "draft_folders",
    "scripted_admin",
    "scripted_workers",
    "memory_kube",
    "charts",
    "network_hosts",
    "deployed",
    "otlp",
    "client_environments",
    "learning_world",
):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
