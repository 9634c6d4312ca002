"""Write checkpoints of ZeRO 1 to 3, after one training step, and of FSDP.

conversion_helpers.py runs this script under torchrun with two CPU processes. The arguments
are the output directory, then `deepspeed`, `fsdp` or both. The expected tensors are
written to `zero1.safetensors`, `zero2.safetensors`, `zero3.safetensors` and `fsdp.safetensors`.
"""

import contextlib
import io
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file


ROOT = Path(__file__).resolve().parents[2]


def tiny_model():
    """Return a tiny model whose vocabulary size is odd, so that every type of padding occurs.

    Norms and biases are random.
    """
    from neobert import NeoBERTConfig, NeoBERTForMaskedLM

    torch.manual_seed(0)
    model = NeoBERTForMaskedLM(
        NeoBERTConfig(
            vocab_size=203,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
        )
    )
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter)
    return model


def batch():
    """Return random token ids that differ between the processes."""
    torch.manual_seed(1 + int(os.environ["RANK"]))
    return torch.randint(0, 203, (2, 8))


def write_deepspeed(folder):
    """Train one step with each ZeRO stage, and save the checkpoint and its reference."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # DeepSpeed would spend minutes on compiling an operation that two processes do not need.
    deepspeed.ops.__compatible_ops__.clear()

    for name, stage, bf16, extra in (
        ("zero1", 1, True, {}),
        ("zero2", 2, False, {"round_robin_gradients": True}),
        ("zero3", 3, True, {}),
    ):
        model = tiny_model()
        # One weight is frozen, and one buffer is that of older model code.
        model.model.transformer_encoder[0].wo.weight.requires_grad_(False)
        model.model.register_buffer("freqs_cis", torch.arange(3.0))

        trainable = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trainable if p.dim() == 1], "weight_decay": 0.0},
        ]

        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage, **extra},
        }
        settings["zero_allow_untested_optimizer"] = True
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=settings
        )

        ids = batch()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(str(folder / name), tag="10")

        if dist.get_rank() == 0:
            if bf16:
                with contextlib.redirect_stdout(io.StringIO()):
                    reference = get_fp32_state_dict_from_zero_checkpoint(str(folder / name))
            else:
                reference = engine.module.state_dict()
            reference = {
                key: value.detach().contiguous().float().clone() for key, value in reference.items()
            }
            save_file(reference, folder / f"{name}.safetensors")
        dist.barrier()
        engine.destroy()


def write_fsdp(folder):
    """Shard a model with FSDP, and save its checkpoints and their reference."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tiny_model()
    reference = {name: value.clone() for name, value in model.state_dict().items()}

    mesh = init_device_mesh("cpu", (2,))
    for block in model.model.transformer_encoder:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters())
    weights, state = get_state_dict(model, optimizer)

    # One checkpoint has the layout of accelerate, with the weights below "model" in
    # pytorch_model_fsdp_0. The other one also contains the state of the optimizer.
    dcp.save(
        {"model": weights},
        checkpoint_id=str(folder / "fsdp" / "checkpoint_3" / "pytorch_model_fsdp_0"),
    )
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder / "fsdp_all"))

    if dist.get_rank() == 0:
        save_file(reference, folder / "fsdp.safetensors")
    dist.barrier()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    engines = sys.argv[2:]
    dist.init_process_group("gloo")
    if "deepspeed" in engines:
        write_deepspeed(target)
    if "fsdp" in engines:
        write_fsdp(target)
    dist.destroy_process_group()

    # The sharded model keeps threads of gloo alive, which sometimes abort the process when the
    # interpreter exits. The files are complete, so the interpreter's exit is skipped.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
