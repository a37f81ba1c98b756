"""Defines the flags of tpu_aot.py and gpu_aot.py: models, way of decoding, lengths."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from specdec_jax.decoding.search_options import BeamOptions
from specdec_jax.drafters.lookahead import LookaheadDecoding
from specdec_jax.models.families import PRESETS
from specdec_jax.models.t5 import T5Config
from specdec_jax.speculative.tree_text import read_tree
from specdec_jax.speculative.trees import DynamicTree, Tree
from tools.lowering import EAGLE, WITHOUT_MODEL, Case

flags.disclaim_key_flags()  # they are the script's, in its --help


class CaseFlags:
    """The flags of one script, which defines them by making this."""

    def __init__(self, target: str) -> None:
        """Defines the flags; `target` is the default of --target."""
        integer = flags.DEFINE_integer
        presets = sorted(name for name, shape in PRESETS.items() if not shape.decoder_only)
        self.target = flags.DEFINE_enum("target", target, presets, "Shape of the target.")
        eagle = [EAGLE + name for name in presets if isinstance(PRESETS[name], T5Config)]
        self.drafter = flags.DEFINE_enum(
            "drafter",
            "t5_1_1/small",
            [*presets, *eagle, *WITHOUT_MODEL],
            f"Shape of the drafter, after {EAGLE} that of a T5 which reads the target's states and"
            " encoder output; or a drafter without a model.",
        )
        self.drafter_layers = integer(
            "drafter_layers", None, "Decoder layers of the drafting model.", lower_bound=1
        )
        self.gamma = integer(
            "gamma", 7, "Tokens drafted per iteration; 0 is plain decoding.", lower_bound=0
        )
        self.tree = flags.DEFINE_string(
            "tree", None, "A tree instead of γ, as for `specdec generate`, such as widths:3,2,1."
        )
        self.beams = integer("num_beams", None, "Beams of a beam search.", lower_bound=1)
        self.width = integer(
            "beam_width", None, "Nodes of each drafted level, by default twice the beams."
        )
        self.batch = integer("batch_size", 1, "Number of rows.", lower_bound=1)
        self.quantize = flags.DEFINE_enum(
            "quantize", None, ["int8"], "Weights of the target in int8, inputs in bfloat16."
        )
        self.input = integer("input_length", 128, "Number of encoder positions.", lower_bound=1)
        self.new = integer("max_new_tokens", 128, "The most new tokens.", lower_bound=1)
        self.temperature = flags.DEFINE_float("temperature", 0.0, "0 is argmax.", lower_bound=0)
        self.text = flags.DEFINE_string("hlo", None, "File for the compiled loop's HLO text.")

    def check(self, argv: Sequence[str]) -> None:
        """Raises UsageError for arguments, and for flags that do not go together."""
        if len(argv) > 1:
            raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
        tree, beams = self.tree.value, self.beams.value
        for name, other in (("num_beams", self.beams), ("gamma", self.gamma)):
            if tree and other.present:
                raise app.UsageError(
                    f"tree: got {tree} with --{name}={other.value}, expected one of the two"
                )
        drafter = self.drafter.value
        if beams and self._has_own_inputs() and self.gamma.value:
            raise app.UsageError(
                f"drafter: got {drafter} with --num_beams={beams}, expected a drafting model"
            )
        if drafter in WITHOUT_MODEL and self.drafter_layers.value:
            raise app.UsageError(
                f"drafter_layers: got {self.drafter_layers.value} with --drafter={drafter},"
                " expected a drafting model"
            )
        if drafter == "lookahead" and (tree or self.gamma.present):
            raise app.UsageError(
                "drafter: got lookahead with a tree or γ, expected neither: it has its own tree"
            )
        if self.width.value and not beams:
            raise app.UsageError(
                f"beam_width: got {self.width.value} without --num_beams, expected it too"
            )
        try:
            if tree and isinstance(read_tree(tree), DynamicTree) and drafter in WITHOUT_MODEL:
                raise ValueError(f"tree: got {tree} with --drafter={drafter}, expected a fixed one")
            if beams:
                BeamOptions(beams, beam_width=self.width.value)
        except ValueError as error:
            raise app.UsageError(str(error)) from None

    def drafts_chains_by_model(self) -> bool:
        """Returns whether a drafting model, which reads tokens alone, drafts a chain."""
        other = self._has_own_inputs() or self.beams.value or self.tree.value
        return bool(self.gamma.value) and not other

    def _has_own_inputs(self) -> bool:
        """Returns whether the drafter is no model, or one that reads the target's states."""
        drafter = self.drafter.value
        return drafter in WITHOUT_MODEL or drafter.startswith(EAGLE)

    def make_case(self, devices: Sequence[Any], **others: Any) -> Case:
        """Returns the programs to compile for `devices`; `others` are further fields."""
        tree = self.make_tree()
        return Case(
            tuple(devices),
            target=self.target.value,
            drafter=self.drafter.value,
            gamma=tree.depth if tree else self.gamma.value,
            tree=tree,
            beams=self.beams.value,
            beam_width=self.width.value,
            batch=self.batch.value,
            int8=self.quantize.value is not None,
            input_length=self.input.value,
            new_tokens=self.new.value,
            temperature=self.temperature.value,
            drafter_layers=self.drafter_layers.value,
            **others,
        )

    def make_tree(self) -> Tree | DynamicTree | None:
        """Returns the tree that is drafted; None for a chain."""
        tree = read_tree(self.tree.value) if self.tree.value else None
        if self.drafter.value == "lookahead":
            tree = LookaheadDecoding().tree
        if isinstance(tree, Tree) and self.drafter.value in WITHOUT_MODEL:
            return dataclasses.replace(tree, children="top")
        return tree

    def record(self, case: Case) -> dict[str, Any]:
        """Returns the part of a record about a case."""
        return {
            "target": case.target,
            "drafter": case.drafter if case.gamma else None,
            "gamma": case.gamma,
            "tree": self.tree.value,
            "num_beams": case.beams,
            "batch_size": case.batch,
            "temperature": case.temperature,
            "dtype": "bfloat16",
            "quantize": self.quantize.value,
        }
