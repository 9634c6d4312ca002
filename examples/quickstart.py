# %% [markdown]
# # Quick start
#
# This script shows the main uses of the package. It runs from top to bottom in a clone after
# `make demo` and `pip install -e '.[eval]'`, in about two minutes on a CPU:
# `python examples/quickstart.py`. Editors with notebook support (VS Code, PyCharm, Spyder) run it
# cell by cell.

# %%
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import pipeline

from neobert import NeoBERTForMaskedLM, PackedEncoder, default_learning_rate


ROOT = Path(__file__).resolve().parent.parent
MASKED_LM = ROOT / "runs" / "demo"
ENCODER = ROOT / "examples" / "sentence-encoder"

# %% [markdown]
# ## Load a model
#
# `import neobert` registers the model in transformers, so no remote code is needed. Use
# `"chandar-lab/NeoBERT"` for the published weights. `runs/demo` is a small model that `make demo`
# converts from a training checkpoint.

# %%
model = NeoBERTForMaskedLM.from_pretrained(MASKED_LM)
print(f"{model.num_parameters() / 1e6:.1f}M parameters, {model.config.num_hidden_layers} layers")
print(f"default learning rate for fine-tuning: {default_learning_rate(model.config.hidden_size)}")

# %% [markdown]
# ## Fill a mask

# %%
fill_mask = pipeline("fill-mask", model=str(MASKED_LM))
for match in fill_mask("surgeon: a [MASK] who performs operations.", top_k=3):
    print(f"{match['score']:.2f} {match['token_str']}")

# %% [markdown]
# ## Embed texts and search
#
# `PackedEncoder` computes no padding. Its methods are those of `SentenceTransformer`.

# %%
encoder = PackedEncoder(str(ENCODER))
documents = [
    "an eagle circles over the valley",
    "she plays the violin",
    "the bank raised its interest rates",
]
document_embeddings = encoder.encode_document(documents)
query_embeddings = encoder.encode_query(["a bird of prey"])
scores = encoder.similarity(query_embeddings, document_embeddings)[0]
for score, document in sorted(zip(scores.tolist(), documents), reverse=True):
    print(f"{score:.2f} {document}")

# %% [markdown]
# ## Fine-tune a classifier
#
# `neobert finetune` infers the task from the file, splits it, and compares the result with simple
# baselines. Here it learns the topic of 48 messages to a shop.


# %%
def neobert(*arguments: object) -> None:
    """Run a command of the package; in a shell, write `neobert ...`."""
    subprocess.run([sys.executable, "-m", "neobert", *map(str, arguments)], check=True, cwd=ROOT)


folder = Path(tempfile.mkdtemp(prefix="neobert-"))
neobert(
    "finetune",
    ROOT / "examples" / "messages.csv",
    "--text-column=message",
    "--label-column=topic",
    f"--model={ENCODER}",
    f"--output={folder / 'classifier'}",
    "--num-train-epochs=10",
    "--validation-percent=15",
    "--test-percent=25",
)

# %% [markdown]
# ## Predict
#
# `neobert predict` writes the label and its calibrated probability for each row of a file.

# %%
new_messages = folder / "new.csv"
new_messages.write_text(
    "message\nmy bill is too high\nthe courier lost my package\nthe program crashes when I print\n"
)
neobert("predict", new_messages, folder / "labels.csv", f"--model={folder / 'classifier'}")
with open(folder / "labels.csv", newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
        print(row)
