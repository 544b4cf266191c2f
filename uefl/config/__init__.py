"""The configuration of a run: sections in TOML, checked key by key and as a whole."""

from ..fields import Section
from .config import Arm, Config, from_table, from_toml
from .load import load, load_whole, preset_groups, preset_text, presets
from .sections import Model, RunSection, Training

__all__ = [
    "Arm",
    "Config",
    "Model",
    "RunSection",
    "Section",
    "Training",
    "from_table",
    "from_toml",
    "load",
    "load_whole",
    "preset_groups",
    "preset_text",
    "presets",
]
