"""The families whose decoder view differs from the default, by the name of mlx-lm's code for them."""

from mlxft.models.families.gated_delta import GatedDeltaView
from mlxft.models.families.gemma import GemmaView
from mlxft.models.families.gemma3 import Gemma3View
from mlxft.models.families.gemma4 import Gemma4View
from mlxft.models.families.granite import GraniteView
from mlxft.models.families.lfm2 import Lfm2View
from mlxft.models.families.whole import PADDED_ONLY, UNTRAINABLE, WholeView

__all__ = ["UNTRAINABLE", "VIEWS"]

VIEWS = {
    "gemma": GemmaView,
    "gemma3_text": Gemma3View,
    "gemma4_text": Gemma4View,
    "granite": GraniteView,
    "lfm2": Lfm2View,
    "qwen3_5": GatedDeltaView,
    "qwen3_next": GatedDeltaView,
    **dict.fromkeys(PADDED_ONLY, WholeView),
}
