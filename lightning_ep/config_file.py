"""A LightningCLI config as facts, without a Trainer, a GPU or weights.

`read_config` finds the strategy's arguments in the file, `config_problems` says what the command line would refuse, and
`config_facts_of` gathers the facts, with the model built on the meta device where that works.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from jsonargparse.typing import import_object
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_ep.checkpoint_facts import one_directory
from lightning_ep.config import EPConfig, value_errors
from lightning_ep.facts import FACT_NAMES, Facts, batch_facts, hardware_facts, version_facts
from lightning_ep.model_facts import config_facts, model_facts, num_experts
from lightning_ep.rule import Given, Violation
from lightning_ep.strategy import EPOverlapStrategy

_OPTION_NAMES = {f.name for f in fields(EPConfig)}
# Their classes may need packages that are not on this machine, and say nothing about a rule.
_OPAQUE = ("strategy", "callbacks", "logger", "plugins", "profiler")


@dataclass(frozen=True)
class RunConfig:
    """What a config file says, as written. `prefix` is "fit." when the file holds a subcommand's section."""

    path: str
    strategy: str | None  # class path or registered name
    init_args: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    data: Any = None
    prefix: str = ""

    def where(self, key: str) -> str:
        return f"{self.path}: {self.prefix}{key}"

    @property
    def origins(self) -> dict[str, str]:
        """File and key of each fact that the file states, for `ConfigurationError.located`."""
        keys = {name: f"trainer.strategy.init_args.{name}" for name in self.init_args}
        keys |= {name: f"trainer.{name}" for name in self.trainer if name in FACT_NAMES}
        if "devices" in self.trainer:
            keys["world_size"] = "trainer.devices x trainer.num_nodes"
        return {name: self.where(key) for name, key in keys.items()}


def read_config(path: str) -> RunConfig:
    """Read a YAML or JSON file.

    Raises:
        ValueError: naming the file, and the position of a syntax error.
    """
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ValueError(f"{path}: is no YAML that can be read (nested too deeply)") from None
    except (yaml.YAMLError, ValueError) as error:  # also bytes that are no text, and numbers of thousands of digits
        raise ValueError(f"{path}: is no YAML ({' '.join(str(error).split())})") from None
    if _contains_itself(document):
        raise ValueError(f"{path}: an anchor is used inside of itself; write the values out")
    if not isinstance(document, Mapping):
        raise ValueError(f"{path}: holds no LightningCLI config; expected keys such as trainer, model, data")
    if "fit" in document and not isinstance(document["fit"], Mapping):
        raise ValueError(f"{path}: fit is {document['fit']!r}; expected keys such as trainer, model, data")
    prefix = "fit." if "trainer" not in document and "fit" in document else ""
    section = document["fit"] if prefix else document
    trainer = section.get("trainer") or {}
    if not isinstance(trainer, Mapping):
        raise ValueError(f"{path}: trainer is {trainer!r}; expected the Trainer's arguments")
    strategy = trainer.get("strategy")
    name, init_args = strategy, {}
    if isinstance(strategy, Mapping):
        name, init_args = strategy.get("class_path"), strategy.get("init_args") or {}
    if not isinstance(name, str | None):
        raise ValueError(f"{path}: trainer.strategy is {strategy!r}; expected a name, or class_path and init_args")
    if not isinstance(init_args, Mapping):
        raise ValueError(f"{path}: trainer.strategy.init_args is {init_args!r}; expected the strategy's arguments")
    return RunConfig(path, name, init_args, trainer, section.get("model"), section.get("data"), prefix)


def _contains_itself(value: Any, outer: tuple[int, ...] = ()) -> bool:
    if not isinstance(value, Mapping | list):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return id(value) in outer or any(_contains_itself(v, (*outer, id(value))) for v in inner)


def config_problems(run: RunConfig) -> list[Violation]:
    """What is wrong with the file itself, all at once: another strategy, unknown arguments, values of a wrong kind."""
    problems = list(_strategy_problems(run))
    options, wrong = _options(run)
    problems += wrong
    for name, text in value_errors(options).items():
        reason, _, fix = text.partition("; ")
        problems.append(_problem("invalid-value", reason, fix, given=(Given(name, options[name], run.origins[name]),)))
    others = {name: value for name, value in run.init_args.items() if name not in _OPTION_NAMES}
    problems += _parse_each(run, EPOverlapStrategy, "trainer.strategy.init_args", others)
    problems += _parse_each(run, Trainer, "trainer", {k: v for k, v in run.trainer.items() if k not in _OPAQUE})
    return problems


def config_facts_of(run: RunConfig) -> tuple[Facts, list[str]]:
    """The facts that the file and this machine give, and sentences about what could not be found out."""
    options, _ = _options(run)
    trainer, notes, origins = run.trainer, [], run.origins
    accumulation = trainer.get("accumulate_grad_batches", 1)
    accelerator = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}.get(str(trainer.get("accelerator")))
    nodes = trainer.get("num_nodes", 1)
    devices = number_of_devices(trainer.get("devices", "auto"))
    precision = trainer.get("precision") or (None if trainer.get("plugins") else "32-true")
    known: dict[str, Any] = {name: value for name, value in options.items() if name in FACT_NAMES}
    known |= {
        "precision": None if precision is None else str(precision),
        "accumulate_grad_batches": accumulation if isinstance(accumulation, int) else None,
        "num_nodes": nodes if isinstance(nodes, int) else None,
        "world_size": devices * nodes if devices and isinstance(nodes, int) else None,
        "accelerator": accelerator,
    }
    known |= batch_facts(_init_args(run.data), _init_args(run.model)) | _checkpoint_facts(run, origins)
    known |= version_facts() | hardware_facts(accelerator)
    for key, settings in _nested(run.model, "model"):
        if num_experts(settings):
            stated = SimpleNamespace(**{str(name): value for name, value in settings.items()})
            for name, (value, attribute) in config_facts(stated).items():
                known[name], origins[name] = value, run.where(f"{key}.{attribute}")
    if run.model is None:
        notes.append("no model in the config: rules about the model were checked as far as --fact states them")
    else:
        try:
            seen, found_in = model_facts(build_on_meta(run.model))
            known |= seen
            origins |= found_in
        except Exception as error:  # whatever a user's model raises, the rest can still be checked
            cause = " ".join(str(error).split())[:300]
            notes.append(
                f"the model could not be built on the meta device ({type(error).__name__}: {cause}); "
                "going on with what the config says"
            )
    return Facts(**known, origins=origins), notes


def number_of_devices(devices: Any) -> int | None:
    """How many devices `Trainer(devices=...)` means; None for "auto" and -1, which ask the machine."""
    if isinstance(devices, list):
        return len(devices)
    parts = [part for part in str(devices).split(",") if part.strip()]
    if len(parts) > 1 or str(devices).endswith(","):
        return len(parts)
    return int(parts[0]) if parts and parts[0].strip().isdecimal() and int(parts[0]) > 0 else None


def build_on_meta(section: Any) -> nn.Module:
    """The LightningModule of a config's `model` section, weights on the meta device. Raises what its code raises."""
    with _working_directory_importable(), torch.device("meta"):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(LightningModule, "model", fail_untyped=False)
        model = parser.instantiate_classes(parser.parse_object({"model": section})).model
        if is_overridden("configure_model", model):
            model.configure_model()
    return model


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    # A console script has the folder of the script on its path, not the one where the user's model lies.
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _strategy_problems(run: RunConfig) -> Iterator[Violation]:
    if run.strategy is None:
        yield _problem(
            "no-strategy",
            f"{run.where('trainer.strategy')}: is not set, so Lightning's default strategy runs",
            "set it to class_path: lightning_ep.EPOverlapStrategy",
            severity="warning",
        )
    elif not _is_ours(run.strategy):
        yield _problem(
            "other-strategy",
            f"{run.where('trainer.strategy')}: {run.strategy!r} is not EPOverlapStrategy, so nothing here would apply",
            "set it to class_path: lightning_ep.EPOverlapStrategy, or 'ep_overlap'",
        )


def _is_ours(strategy: str) -> bool:
    if strategy == EPOverlapStrategy.strategy_name or strategy.rpartition(".")[2] == EPOverlapStrategy.__name__:
        return True
    return _is_a(strategy, EPOverlapStrategy)


def _is_a(class_path: str | None, base: type) -> bool:
    """Whether a class path leads to a `base`; one whose package is not here, or does not import here, does not."""
    try:
        with _working_directory_importable():
            found = import_object(class_path or "")
    except Exception:
        return False
    return isinstance(found, type) and issubclass(found, base)


def _checkpoint_facts(run: RunConfig, origins: dict[str, str]) -> dict[str, str]:
    """Where the file lets checkpoints be written, and by which plugin if not by Lightning's default one."""
    facts: dict[str, str] = {}

    def classes(key: str, package: str, base: type) -> list[tuple[str, Mapping[str, Any]]]:
        section = run.trainer.get(key)
        found = []
        for entry in section if isinstance(section, list) else [section]:
            name = entry.get("class_path") if isinstance(entry, Mapping) else entry
            path = name if "." in str(name) else f"{package}.{name}"  # LightningCLI takes bare names of Lightning's
            if _is_a(path, base):
                found.append((path, _init_args(entry)))
        return found

    for path, _ in classes("plugins", "lightning.pytorch.plugins", CheckpointIO):
        if not _is_a(path, TorchCheckpointIO):
            facts["checkpoint_io"], origins["checkpoint_io"] = path.rpartition(".")[2], run.where("trainer.plugins")
    if run.trainer.get("enable_checkpointing") is False:
        return facts
    implied = (run.trainer.get("default_root_dir"), run.where("trainer.default_root_dir"))
    for _, arguments in classes("logger", "lightning.pytorch.loggers", Logger)[:1]:
        if "save_dir" in arguments:
            implied = (arguments["save_dir"], run.where("trainer.logger.init_args.save_dir"))
    own = run.where("trainer.callbacks.init_args.dirpath")
    callbacks = classes("callbacks", "lightning.pytorch.callbacks", Checkpoint) or [("", {})]
    paths = [arguments.get("dirpath") for _, arguments in callbacks]
    if chosen := one_directory((path, own) if path else implied for path in paths):
        facts["checkpoint_dir"], origins["checkpoint_dir"] = chosen
    return facts


def _options(run: RunConfig) -> tuple[dict[str, Any], list[Violation]]:
    """The strategy's own arguments in their types, defaults filled in, and those whose value does not fit."""
    defaults = {f.name: f.default for f in fields(EPConfig) if f.default is not MISSING}
    parser, _ = _argument_parser(EPConfig)
    problems = []
    for name in [name for name in run.init_args if name in _OPTION_NAMES]:
        try:
            value = parser.parse_object({"of": {name: run.init_args[name]}})["of"][name]
            defaults[name] = tuple(value or ()) if isinstance(defaults[name], tuple) else value
        except ArgumentError as error:
            problems.append(_wrong_argument(Given(name, run.init_args[name], run.origins[name]), error))
    return defaults, problems


def _parse_each(run: RunConfig, cls: type, key: str, values: Mapping[str, Any]) -> list[Violation]:
    """Arguments of `cls` parsed one by one, as LightningCLI would, so that one mistake does not hide the next."""
    parser, names = _argument_parser(cls)
    problems = []
    for name, value in values.items():
        given = Given(name, value, run.where(f"{key}.{name}"))
        if name not in names:
            close = difflib.get_close_matches(
                str(name), names | (_OPTION_NAMES if cls is EPOverlapStrategy else set()), n=1
            )
            fix = f"write {close[0]}" if close else "take it out"
            problems.append(_problem("unknown-argument", f"{cls.__name__} has no such argument", fix, (given,)))
            continue
        try:
            parser.parse_object({"of": {name: value}})
        except ArgumentError as error:
            problems.append(_wrong_argument(given, error))
    return problems


@cache
def _argument_parser(cls: type) -> tuple[ArgumentParser, set[str]]:
    """A parser for the arguments of `cls` under "of", with their names; the signatures take a second to read."""
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(cls, "of", fail_untyped=False, sub_configs=True)
    return parser, {key.removeprefix("of.") for key in added}


def _wrong_argument(given: Given, error: ArgumentError) -> Violation:
    message = " ".join(str(error).replace("of.", "").split())
    return _problem("invalid-argument", message, "give it a value of that kind", (given,))


def _problem(
    identifier: str, reason: str, fix: str, given: tuple[Given, ...] = (), severity: Any = "error"
) -> Violation:
    return Violation(
        identifier, severity, "`lightning-ep fit` refuses the config or ignores the argument", reason, fix, given
    )


def _init_args(section: Any) -> Mapping[str, Any]:
    if not isinstance(section, Mapping):
        return {}
    inner = section.get("init_args", section)
    return inner if isinstance(inner, Mapping) else {}


def _nested(section: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(section, Mapping):
        yield key, section
        for name, value in section.items():
            yield from _nested(value, f"{key}.{name}")
