"""Raw training checkpoint to a Hub folder (docs/conversion.md).

The way of a checkpoint: `locate` finds the step and lists its tensors by one reader for each format
(`torch_files`, `safetensors_files`,
`deepspeed`, `distributed`); `architecture` makes of them a checked `Conversion`, with a row of the
table in `heads`; `hub_folder` and
`tokenizer` write it; `verify` loads the result in a fresh process and compares; `push` uploads it.
"""
