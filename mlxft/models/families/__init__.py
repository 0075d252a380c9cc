"""The families whose decoder view differs from the default, by the `model_type` of config.json."""

from mlxft.models.families.gemma3 import Gemma3View

VIEWS = {
    "gemma3": Gemma3View,
    "gemma3_text": Gemma3View,
}
