"""Reads a Hugging Face config.json as a Model.  An unmodelled feature is an error that names its
key.

Keys that change neither bytes nor FLOPs are ignored (`rope_theta`, scalars on embeddings, residuals
and logits, epsilons of norms, initialisation).  config/architectures.yaml has the architectures.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rematbench.inputs.architectures import Architecture, Windows, architectures, common
from rematbench.inputs.configfile import ConfigError, closest, convert, validation_problem
from rematbench.model import Cap, Layers, Length, Probability, Width
from rematbench.workload import Model

Config = Mapping[str, Any]

OWN_FILE = (
    "; a model file of your own can describe the rest (docs/own_model_and_cluster.md, "
    "config/models/llama3-8b.yaml)"
)


def is_huggingface(data: Config) -> bool:
    """Whether a mapping is a config of Transformers, not a model file of rematbench."""
    keys = {key for names in common().shape.values() for key in names} - {"num_layers"}
    return "model_type" in data or "architectures" in data or len(keys & data.keys()) > 1


def model_from_huggingface(data: Config, path: Path) -> Model:
    """The Model of a Transformers config, whose `source` is the file.  ConfigError for a missing
    key or an unmodelled feature."""
    label = str(path)
    kind = data.get("model_type")
    if kind is None:
        raise ConfigError(label, "", "model_type is missing (the architecture, such as llama)")
    text = next((data[key] for key in common().text if isinstance(data.get(key), dict)), None)
    left_out = ""
    if kind not in architectures() and text is not None and "model_type" in text:
        left_out = "only the text part of the model"
        others = dict.fromkeys(words for key, words in common().encoders.items() if data.get(key))
        if others:
            left_out += f": {' and '.join(others)} {'is' if len(others) == 1 else 'are'} left out"
        tied = {key: data[key] for key in common().optional["tied_embeddings"] if key in data}
        data, kind = {**tied, **text}, text["model_type"]
    known = architectures().get(str(kind))
    _checked(data, label, known)
    if known is None or str(kind).startswith("."):
        raise ConfigError(label, "model_type", _unmodelled(str(kind), data))
    try:
        fields = _Reader(data, known, text_part=bool(left_out)).fields()
    except KeyError as error:
        raise ConfigError(label, str(error.args[0]), "required key is missing") from error
    except Unmodelled as error:
        problem = f"{error.reason}, which is not modelled{OWN_FILE}"
        raise ConfigError(label, error.key, problem) from error
    more = [left_out, fields.get("left_out", ""), *_left_out(data, known)]
    if any(more):
        fields["left_out"] = "; ".join(filter(None, more))
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return convert({"name": name, "source": f"Hugging Face config {label}", **fields}, Model, label)


def _left_out(data: Config, known: Architecture) -> list[str]:
    """The features of a config, in words, that its Model leaves out."""
    words = []
    if data.get("num_nextn_predict_layers") and "mtp_layers" not in known.keys:
        words.append("layers that predict more than one token are left out")
    if data.get("quantization_config") and known.dequantised:
        words.append("the quantised weights of the checkpoint are read as the run's precision")
    return words


@cache
def _checked_keys() -> type[msgspec.Struct]:
    """A struct with the keys whose values are checked before they are read, and their types."""
    usual = common()
    types: dict[str, Any] = {}
    widths = ("hidden", "num_heads", "ffn", "vocab")
    for field, keys in usual.shape.items():
        types |= dict.fromkeys(keys, Width if field in widths else Layers)
    for field in ("num_kv_heads", "head_dim"):
        types |= dict.fromkeys(usual.optional[field], Width)
    types |= dict.fromkeys(usual.optional["max_positions"], Length)
    types |= dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), bool)
    for field in ("dropout", "attention_dropout", "embedding_dropout"):
        types |= dict.fromkeys(usual.optional[field], Probability)
    types |= dict.fromkeys((*usual.rotary, *usual.ratio), Annotated[float, Meta(gt=0.0, le=1024.0)])
    types |= dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Cap)
    types |= dict.fromkeys((*usual.window, "max_window_layers", "rotary_dim"), Length)
    types |= dict.fromkeys(("layer_types", "attention_layers"), list[str])
    types |= dict.fromkeys(("quantization_config", "attn_config"), dict[str, Any])
    fields = [(key, kind, None) for key, kind in types.items() if "." not in key]
    return msgspec.defstruct("_Known", fields)


def _checked(data: Config, label: str, known: Architecture | None) -> None:
    """ConfigError for a value of a wrong type, for experts in an architecture that is read without
    experts, and for a quantised checkpoint (FP8 too) unless the architecture is dequantised."""
    try:
        msgspec.convert(
            {key: value for key, value in data.items() if value is not None}, _checked_keys()
        )
    except msgspec.ValidationError as error:
        raise ConfigError(label, *validation_problem(str(error), _checked_keys())) from error
    for key in common().experts if known and "experts.count" not in known.keys else ():
        if isinstance(data.get(key), int) and data[key] > 1:
            kind = data.get("model_type")
            problem = f"mixture of experts ({data[key]} experts) of {kind!r} is not modelled"
            raise ConfigError(label, key, f"{problem}{OWN_FILE}")
    if quantization := data.get("quantization_config"):
        method = quantization.get("quant_method", "quantised")
        if known is None or method not in known.dequantised:
            problem = f"{method} weights are not modelled (remove this key to read the file)"
            raise ConfigError(label, "quantization_config", problem)


class Unmodelled(Exception):
    """A key of a Transformers config requests a feature that Model cannot express."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason


def _unmodelled(kind: str, data: Config) -> str:
    """Why an architecture is not modelled, from the features that its keys show.  A similar name is
    not suggested, because reading the config as another architecture would drop features."""
    known = sorted(name for name in architectures() if not name.startswith("."))
    has = dict.fromkeys(words for key, words in common().features.items() if _at(data, key))
    why = f" because it has {' and '.join(has)}" if has else ""
    close = [name for name in known if name.lower() == kind.replace("-", "_").lower()]
    typed = closest(kind, close) or (f"; did you mean {close[0]!r}?" if close else "")
    own = "" if "block_configs" in data else OWN_FILE  # model files have no layers of other widths
    listed = f" (config/architectures.yaml has the {len(known)} modelled architectures)"
    return f"{kind!r} is not modelled{why}{typed}{listed}{own}"


def _at(data: Config, key: str) -> Any:
    """The value of a key or of a path into mappings (`a.b`); None if it is absent."""
    value: Any = data
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _split(fields: dict[str, Any], mark: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields whose names begin with `mark`, without it; the other fields)."""
    inside = {k.removeprefix(mark): v for k, v in fields.items() if k.startswith(mark)}
    return inside, {k: v for k, v in fields.items() if not k.startswith(mark)}


class _Reader:
    """Reads the fields of a Model from a config of a known architecture."""

    def __init__(self, data: Config, known: Architecture, *, text_part: bool) -> None:
        self.known = known
        self.data = {**known.defaults, **data}
        self.given = self.data if text_part else data

    def fields(self) -> dict[str, Any]:
        """The Model's values by field.  KeyError for a missing key; Unmodelled for a feature."""
        known = self.known
        self._only()
        found: dict[str, Any] = {field: self._shape(field) for field in common().shape}
        for field, factor in known.times.items():
            found[field] = int(found[field] * factor)
        found["num_kv_heads"] = self._field("num_kv_heads") or found["num_heads"]
        found["head_dim"] = self._field("head_dim") or found["hidden"] // found["num_heads"]
        found["max_positions"] = self._field("max_positions") or 0
        found["max_positions"] += known.plus.get("max_positions", 0)
        found["tied_embeddings"] = bool(self._field("tied_embeddings"))
        found |= self._rates() | self._activation()
        more = known.keys.keys() - common().shape.keys() - common().optional.keys()
        values = {field: self._value(known.keys[field]) for field in more}
        found |= {field: value for field, value in values.items() if value is not None}
        found |= known.facts
        for rule in known.when:
            if all(self._is(key, value) for key, value in rule.condition.items()):
                found |= rule.facts
        if "experts.count" in known.keys:
            found = self._with_experts(found)
        if "latent.kv_rank" in known.keys:
            latent, rest = _split(found, "latent.")
            sizes = {"head_dim": latent["nope"] + latent["rope"], "num_kv_heads": rest["num_heads"]}
            found = {**rest, **sizes, "latent": latent}
        windows = self._windows(found["num_layers"])
        found["attention_window"] = windows if any(windows) else []
        if found["position"] == "rope" and not {"rotary_share", "latent"} & {*known.facts, *found}:
            found["rotary_share"] = self._rotary(found, windows)
        return found

    def _with_experts(self, found: dict[str, Any]) -> dict[str, Any]:
        """The fields with those named `experts.*` gathered in the field `experts`, which is left
        out if there is a single expert or no layer has experts."""
        experts, rest = _split(found, "experts.")
        layers = range(found["num_layers"])
        dense = [layer for layer in layers if not self._is_sparse(layer)]
        if experts.get("count", 0) <= 1 or len(dense) == len(layers):
            return rest
        for field, value in experts.items():
            if isinstance(value, list):  # it has a value for each layer
                if len(set(value)) > 1:
                    key = self.known.keys[f"experts.{field}"]
                    raise Unmodelled(str(key), "experts that differ from layer to layer")
                experts[field] = value[0]
        if "shared_units" in experts:  # the key counts the shared experts
            experts["shared_ffn"] = experts.pop("shared_units") * experts["ffn"]
        return {**rest, "experts": {**experts, "dense_layers": dense}}

    def _is_sparse(self, layer: int) -> bool:
        rule = self.known.sparse
        if rule is None:
            return True
        if kinds := self.data.get("mlp_layer_types"):
            return bool(kinds[layer] == "sparse")
        every = self.data.get(rule.every, 1)
        after, but = self.data.get(rule.after) or 0, self.data.get(rule.but) or ()
        until = self.data.get(rule.until, -1)
        inside = after <= layer and (until < 0 or layer <= until) and layer not in but
        return bool(inside and every > 0 and (layer + 1) % every == 0)

    def _get(self, key: str, data: Config | None = None) -> Any:
        return _at(self.data if data is None else data, key)

    def _is(self, key: str, value: Any) -> bool:
        """Whether a key has a value; null stands for the architecture's default."""
        given = self._get(key)
        return bool((self._get(key, self.known.defaults) if given is None else given) == value)

    def _value(self, keys: str | tuple[str, ...], data: Config | None = None) -> Any:
        """The value of the first of the keys that is present; `!key` negates it."""
        for key in (keys,) if isinstance(keys, str) else keys:
            value = self._get(key.removeprefix("!"), data)
            if value is not None:
                return not value if key.startswith("!") else value
        return None

    def _field(self, field: str) -> Any:
        return self._value(self.known.keys.get(field, common().optional[field]))

    def _shape(self, field: str) -> int:
        """A width or count.  Only the text part of a larger model may rely on defaults."""
        keys = self.known.keys.get(field, common().shape[field])
        value = self._value(keys, self.given)
        if value is None and field == "ffn" and self.known.ffn_per_hidden:
            ratio = self._value(common().ratio) or self.known.ffn_per_hidden
            return int(ratio * self._shape("hidden"))
        if value is None:
            raise KeyError(keys if isinstance(keys, str) else keys[0])
        return int(value)

    def _only(self) -> None:
        """Unmodelled for a key with another value than the supported one."""
        for key, rule in self.known.only.items():
            value = self._get(key)
            same = self._get(rule.same_as) if rule.same_as else rule.value
            if value is not None and value != same:
                raise Unmodelled(key, rule.otherwise)

    def _rates(self) -> dict[str, Any]:
        """The dropout rates; rates equal to that of the outputs are left out."""
        rates = {
            name: float(self._field(name) or 0.0)
            for name in ("dropout", "attention_dropout", "embedding_dropout")
        }
        return {
            name: rate
            for name, rate in rates.items()
            if name == "dropout" or rate != rates["dropout"]
        }

    def _activation(self) -> dict[str, Any]:
        keys = common().activation
        key = next((key for key in keys if self.data.get(key)), keys[1])
        name = self.data.get(key)
        allowed = common().gated if self.known.gated else common().plain
        if name not in allowed:
            kind = "a gated MLP" if self.known.gated else "an MLP of two matrices"
            raise Unmodelled(key, f"activation {name!r} in {kind}")
        steps = common().steps.get(name, 0.0)
        return {"mlp": allowed[name]} | ({"activation_steps": steps} if steps else {})

    def _windows(self, layers: int) -> list[int]:
        """The attention window of each layer in tokens (0: the whole prefix)."""
        rule, window = self.known.windows, self._value(common().window)
        kinds = self.data.get("layer_types") or self.data.get("attention_layers")
        for key, name in (("layer_types", kind) for kind in kinds or ()):
            if name not in common().slides:
                raise Unmodelled(key, f"layers of the kind {name!r}")
        if rule is None or not window or (rule.switch and not self.data.get(rule.switch)):
            return [0] * layers
        if kinds is None and self.data.get("attention_types"):
            kinds = [k for names, count in self.data["attention_types"] for k in names * count]
        slides = [common().slides[kind] for kind in kinds] if kinds else self._sliding(rule, layers)
        return [window if slid else 0 for slid in slides]

    def _sliding(self, rule: Windows, layers: int) -> list[bool]:
        """Whether each layer attends to a window, from the architecture's pattern."""
        if rule.full_before:
            full = self.data.get(rule.full_before, layers)
            return [layer >= full for layer in range(layers)]
        pattern = self.data.get("sliding_window_pattern", rule.full_every)
        if pattern is None:
            raise KeyError("layer_types")
        if isinstance(pattern, str):
            return [common().slides[pattern[layer % len(pattern)]] for layer in range(layers)]
        place = 0 if rule.first_full else pattern - 1
        return [not pattern or layer % pattern != place for layer in range(layers)]

    def _rotary(self, found: dict[str, Any], windows: list[int]) -> float:
        """The share of query and key elements that get rotary positions, averaged over layers."""
        share = float(self._value(common().rotary) or 1.0)
        if self.data.get("rotary_dim"):
            share = self.data["rotary_dim"] / found["head_dim"]
        layers = found["num_layers"]
        if self.known.rotary == "sliding" and any(windows):
            share *= sum(map(bool, windows)) / layers
        if self.known.rotary == "no_rope_layers":
            interval = self.data["no_rope_layer_interval"]
            every = [int((layer + 1) % interval != 0) for layer in range(layers)]
            share *= sum(self.data.get("no_rope_layers") or every) / layers
        return min(1.0, share)
