"""Let a CPU-only torch and a CUDA-built torchvision live in one environment.

Some package indexes offer a CPU build of torch but no CPU build of torchvision. Its compiled
operators then cannot load, and `import torchvision` (hence open_clip, clean-fid and parts of
transformers) fails with "operator torchvision::nms does not exist", although only torchvision's
pure Python parts are needed here. This script, run by `make` inside the environment that make
itself created, declares the two operators whose registration fails. It does nothing where
torchvision imports as it is, and it is safe to run twice.
"""

import importlib.util
import pathlib
import subprocess
import sys

MARK = "# declared by concept_eraser's tools/mend_torchvision.py"
DECLARATION = f"""

{MARK}
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def imports() -> bool:
    return (
        subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode
        == 0
    )


def main() -> int:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        print("torchvision is not installed; nothing to mend")
        return 0
    if imports():
        return 0
    extension = pathlib.Path(spec.origin).parent / "extension.py"
    text = extension.read_text()
    if MARK not in text:
        extension.write_text(text + DECLARATION)
    if imports():
        print(
            "torchvision's compiled operators do not fit this torch; declared them so "
            "that its Python parts work"
        )
        return 0
    print(
        "torchvision does not import, and not for the reason this script knows; see "
        "`python -c 'import torchvision'`"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
