"""Options of the commands of this directory, `neobert finetune` and `neobert glue`."""

from ..common.options import OptionParser
from .finetune_options import FINETUNE
from .glue_options import GLUE_OPTIONS


OPTIONS: dict[str, OptionParser] = {"finetune": FINETUNE, "glue": GLUE_OPTIONS}
