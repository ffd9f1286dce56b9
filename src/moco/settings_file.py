"""Settings files: YAML, read without running anything or growing beyond what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moco.errors import UserError


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML settings file. Raises UserError where there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            # A few of them, one inside the other, stand for more than fits into memory.
            raise UserError(f"{path} uses aliases (*name): write the values out")
        values = yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"cannot read the settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the settings file {path} is not UTF-8 text: save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # What PyYAML lets through for values that are not what their form or tag says, such as 2001-99-99.
        raise UserError(f"{path} holds a value that is none ({' '.join(str(error).split())})") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold `name: value` lines")
    return {str(name).replace("-", "_"): value for name, value in values.items()}
