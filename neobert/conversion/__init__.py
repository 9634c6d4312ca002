"""Conversion of raw training checkpoints to folders for the Hub (docs/conversion.md).

A checkpoint passes through these modules: `locate` finds the step and calls the reader of its
format (`weight_files`, `deepspeed`, `distributed`); `architecture` turns the tensors into a checked
`Conversion`, with a row of the table in `heads`; `hub_folder` and `tokenizer` write it; `verify`
loads the result in a fresh process and compares the outputs.
"""
