"""Registration of the NeoBERT classes with the Auto classes of transformers.

`import neobert` imports neither torch nor transformers. The classes are registered at once if
transformers has been imported before, and otherwise by an import hook as soon as it is imported.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


_MODEL_FILES = tuple(
    f"{__package__}.{name}_neobert" for name in ("configuration", "attention", "modeling")
)


def register_with_transformers() -> None:
    """Register the NeoBERT classes now, or as soon as transformers is imported."""
    # Finders are asked in order, and the regular one would end the search.
    sys.meta_path.insert(0, _ImportHook)
    _ImportHook.register_if_complete()


def _register() -> None:
    """Register the configuration, tokenizer and model classes with the Auto classes."""
    import transformers

    from .configuration_neobert import AUTO_MAP, NeoBERTConfig

    transformers.AutoConfig.register("neobert", NeoBERTConfig, exist_ok=True)
    transformers.AutoTokenizer.register(
        NeoBERTConfig,
        fast_tokenizer_class=transformers.BertTokenizerFast,  # type: ignore[attr-defined]
        exist_ok=True,
    )
    # AutoConfig is registered by the model type above, and the other classes by the configuration.
    for auto_class, path in AUTO_MAP.items():
        file, name = path.split(".")
        if auto_class != "AutoConfig":
            model_class = getattr(importlib.import_module(f".{file}", __package__), name)
            getattr(transformers, auto_class).register(NeoBERTConfig, model_class, exist_ok=True)


class _ImportHook:
    """Import hook that registers the classes after transformers has been imported.

    A partially imported module has no classes to register yet, so the hook waits until none of
    the watched modules is being imported.
    """

    watched = ("transformers", *_MODEL_FILES)
    imports_in_progress = 0

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # The result is that of the regular finder, with a loader that also registers the classes.
        spec = PathFinder.find_spec(name, path) if name in cls.watched else None
        if spec is None or spec.loader is None:
            return None
        exec_module = spec.loader.exec_module

        # The modules import each other: only the end of the outermost import completes all of them.
        def exec_module_and_register(module: ModuleType) -> None:
            cls.imports_in_progress += 1
            try:
                exec_module(module)
            finally:
                cls.imports_in_progress -= 1
            cls.register_if_complete()

        spec.loader.exec_module = exec_module_and_register  # type: ignore[method-assign]
        return spec

    @classmethod
    def register_if_complete(cls) -> None:
        # Every class is registered at once, so the hook has no further purpose.
        if cls.imports_in_progress == 0 and "transformers" in sys.modules:
            sys.meta_path.remove(cls)
            _register()
