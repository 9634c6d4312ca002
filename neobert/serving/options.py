"""Options of `neobert serve`. Imports neither torch nor transformers."""

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from ..common.constants import DEVICE_HELP
from ..common.errors import UserError
from ..common.options import OptionGroup, OptionParser, option
from ..embeddings.options import AUTO_DTYPE_HELP, BATCH_TOKENS_HELP, EncoderOptions


API_KEY_VARIABLE = "NEOBERT_API_KEY"
# Directory in which the workers of a server share their metrics. prometheus_client reads the
# variable when it is imported.
METRICS_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# Maximum number of texts per request, as in the API of OpenAI, and of characters per text.
MAX_TEXTS = 2048
MAX_CHARACTERS = 100_000
# Maximum number of characters of all texts of a request. The tokens of more would take gigabytes of
# memory. Each pair of a rerank request counts the query again.
MAX_TOTAL_CHARACTERS = 10_000_000
MAX_REQUEST_BYTES = 32 * 2**20
# Maximum size of the bodies of all requests in progress in a worker process. The queue only counts
# tokens, which are unknown until a body has been received and its texts have been tokenized.
MAX_STORED_BYTES = 8 * MAX_REQUEST_BYTES


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """Models of the server."""

    title = "Models"

    model: str = option(
        help="Sentence encoder, or encoder without a pooling module: a directory or a name on the "
        "Hub.",
        metavar="NAME",
    )
    reranker: str | None = option(
        None, "NeoBERT CrossEncoder with one score per pair, for the rerank routes.", metavar="NAME"
    )
    classifier: str | None = option(
        None, "NeoBERT sequence classifier, for /predict.", metavar="NAME"
    )
    dtype: Literal["float32", "bfloat16", "int8", "auto"] = option(
        "float32",
        f"Precision of the models. int8 is for NeoBERT on a CPU. {AUTO_DTYPE_HELP}",
    )
    device: str | None = option(None, DEVICE_HELP, metavar="NAME")


@dataclass(frozen=True)
class ServedEncoderOptions(EncoderOptions):
    """Options of loading the encoder. Long texts are refused or truncated by another option."""

    max_length: Annotated[int, Meta(ge=3, le=2**31 - 1)] | None = option(
        None, "Maximum sequence length in tokens. By default the limit of the model."
    )


@dataclass(frozen=True)
class RequestOptions(OptionGroup):
    """Limits and interpretation of requests."""

    title = "Requests"

    truncate: bool = option(
        False, "Truncate texts above the limit of the model instead of refusing them with HTTP 400."
    )
    tiktoken_encoding: str | None = option(
        None,
        "tiktoken encoding that decodes token IDs in requests to text, such as cl100k_base for "
        "LangChain. Token IDs that start and end with the special tokens of the model are not "
        "decoded.",
        metavar="NAME",
    )
    timeout: Annotated[float, Meta(gt=0)] = option(
        60.0,
        "Maximum duration of a request in seconds. Longer requests are cancelled with HTTP 503, "
        "and incomplete uploads with HTTP 408.",
    )
    batch_tokens: Annotated[int, Meta(ge=1)] | None = option(None, BATCH_TOKENS_HELP)
    queue_tokens: Annotated[int, Meta(ge=1)] = option(
        200_000,
        "Maximum number of tokens in the queue of a model. A request that does not fit at the "
        "moment is refused with HTTP 429, and a request with more tokens than this with HTTP 413.",
    )


@dataclass(frozen=True)
class ServerOptions(OptionGroup):
    """Address, processes and access."""

    title = "Server"

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: Annotated[int, Meta(ge=0, le=65535)] = option(
        8000, "Port to listen on; 0 for a free port."
    )
    workers: Annotated[int, Meta(ge=1)] = option(
        1, "Number of processes, each with its own copy of the models and its own queue."
    )
    threads: Annotated[int, Meta(ge=1)] | None = option(
        None,
        "Number of threads of each process for the models. By default the cores divided by the "
        "workers.",
    )
    api_key: str | None = option(
        None,
        "Key that clients send as a bearer token. By default the value of the environment variable "
        f"{API_KEY_VARIABLE}. Other users of the machine can read the command line, but not the "
        "variable.",
        metavar="TEXT",
    )

    @property
    def key(self) -> str | None:
        """API key of the option or of the environment; None if the server is open.

        Raises:
            UserError: If the environment variable is empty.
        """
        # A variable that was meant to contain a key must not open the server.
        key = self.api_key or os.environ.get(API_KEY_VARIABLE)
        if key == "":
            raise UserError(
                f"the environment variable {API_KEY_VARIABLE} must not be empty. Set it to a key, "
                "or unset it for a server without a key."
            )
        return key


@dataclass(frozen=True)
class ServeOptions:
    """Options of `neobert serve`."""

    models: ModelOptions
    encoder: ServedEncoderOptions = ServedEncoderOptions()
    requests: RequestOptions = RequestOptions()
    server: ServerOptions = ServerOptions()


OPTIONS = {
    "serve": OptionParser(
        "neobert serve",
        "Serve embeddings, reranker scores and predictions over HTTP, with the APIs of OpenAI, "
        "Cohere, Jina and Text Embeddings Inference.",
        ServeOptions,
        "neobert serve --model examples/sentence-encoder",
    ),
}
