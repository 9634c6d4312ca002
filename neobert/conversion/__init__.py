"""Raw training checkpoint to a Hub folder (docs/conversion.md).

The way of a checkpoint: `locate` finds the step and reads its tensors by the reader of its format
(`weight_files`, `deepspeed`, `distributed`); `architecture` makes of them a checked `Conversion`,
with a row of the table in `heads`; `hub_folder` and `tokenizer` write it; `verify` loads the result
in a fresh process and compares.
"""
