"""`python -m onnxpar.olive > passes.json` writes the file for `olive run --package-config`."""

import json

from onnxpar.olive.package_config import package_config

if __name__ == "__main__":
    print(json.dumps(package_config(), indent=2))
