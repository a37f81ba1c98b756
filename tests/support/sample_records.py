"""Records of every kind as commands write them, with round numbers."""

import json
from typing import Any

from specdec_jax.analysis.report import records, summaries


def read_macros() -> Any:
    """Returns the macros that several summaries share."""
    return summaries._TEMPLATES.get_template("parts.txt").module


def parse(record: Any) -> Any:
    """Returns a record as `read_records` has it after it was written."""
    return records.parse(json.loads(json.dumps(record)))


MACHINE = {
    "python": "3.11",
    "jax": "0.10",
    "processor": "A <fast> one",
    "cores": 2,
    "device": "cpu: cpu, 1",
}
IMPROVEMENT = {"median": 1.5, "least": 1.25, "most": 1.75}
BENCHMARK = {
    "machine": MACHINE,
    "target": {"name": "big"},
    "drafter": {"name": "small"},
    "sentences": 7,
    "options": {
        "temperature": 0.0,
        "verifier": "block",
        "input_file": "/some/where/ende/test.tsv.gz",
    },
    "cost_ratio": 0.0625,
    "verify_cost": {"3": 1.375},
    "bare": {"cost_ratio": 0.03125, "verify_cost": {"3": 1.25}},
    "speculative": [
        {
            "gamma": 3,
            "synthetic_alpha": None,
            "stats": {"acceptance_rate": 0.8125, "tokens_per_target_call": 2.75},
            "differences": [],
            "predicted": {"with_lengths": 1.625},
            "improvement": IMPROVEMENT,
        }
    ],
    "trees": [
        {
            "tree": "widths:2",
            "nodes": 3,
            "depth": 1,
            "verifier": "mixed",
            "verify_cost": 1.125,
            "differences": [],
            "stats": {"acceptance_rate": None, "tokens_per_target_call": 1.75},
            "predicted": 1.875,
            "improvement": IMPROVEMENT,
        }
    ],
    "example": {
        "input": "A < B",
        "variants": [
            {
                "gamma": 0,
                "lines": [],
                "spans": [
                    ["target encoder", 0.001],
                    ["target call", 0.002],
                    ["target call", 0.002],
                ],
            },
            {
                "gamma": 3,
                "lines": [[["accepted", "Eins &"], ["rejected", " zwei"], ["corrected", " drei"]]],
                "spans": [
                    ["target encoder", 0.001],
                    ["draft step", 0.0005],
                    ["draft step", 0.0005],
                    ["target call", 0.002],
                ],
            },
        ],
        "trees": [
            {
                "tree": "widths:2",
                "call": 1,
                "path": [0, 2],
                "own": " vier",
                "nodes": [
                    {"text": "[START]", "parent": -1},
                    {"text": "Zwei", "parent": 0},
                    {"text": "Drei <", "parent": 0},
                ],
            }
        ],
    },
}
MEASURE = {
    **{
        name: BENCHMARK[name]
        for name in ("machine", "target", "drafter", "sentences", "cost_ratio")
    },
    "options": {"temperature": 1.0, "verifier": "token", "input_file": None, "batch_size": 1},
    "acceptance": {
        "alpha": 0.625,
        "by_position": {"token": [{"accepted": 0.5, "standard_error": None}]},
        "hit_rate": {
            "mixed": [
                {"covered": 0.625, "standard_error": 0.125},
                {"covered": 0.75, "standard_error": None},
            ]
        },
        "by_depth": {"token": [{"accepted": 0.5, "standard_error": 0.125}]},
        "hit_rate_by_depth": {"mixed": [[], [{"covered": 0.75, "standard_error": None}]]},
    },
    "verify_cost": {"1": 1.0, "2": 1.25},
    "table": [
        {
            "gamma": 1,
            "verify_cost": 1.25,
            "tokens": 1.625,
            "theorem_3_8": 1.5,
            "with_verify_cost": 1.24,
            "by_position": {"token": {"tokens": 1.5, "with_verify_cost": 1.125}},
        }
    ],
}
SHOWN = {
    **{name: BENCHMARK[name] for name in ("machine", "target", "drafter")},
    "options": {"temperature": 0.5},
    "calls": [
        {
            "input": "C & D",
            "lines": [[["committed", "Vier"], ["accepted", " fünf"], ["bonus", " sechs"]]],
        }
    ],
    "tree": BENCHMARK["example"]["trees"][0] | {"input": "C & D"},
}
COMPARED = {
    "machine": MACHINE,
    "target": "big",
    "input_file": "test.txt",
    "sentences": 9,
    "temperature": 0.0,
    "verifier": "token",
    "plain_seconds": [1.0],
    "variants": [
        {
            "variant": "lookup,gamma=2",
            "alpha": 0.25,
            "tokens_per_call": 1.125,
            "drafted_per_call": 0.5,
            "differ": 0,
            "improvement": IMPROVEMENT,
            "compile_seconds": 1.0,
            "cost_ratio": None,
            "verify_cost": None,
        },
    ],
}


SEARCHED = {
    **{name: BENCHMARK[name] for name in ("machine", "target", "drafter", "sentences")},
    "options": BENCHMARK["options"] | {"num_beams": 4},
    "searches": [
        {
            "gamma": 2,
            "width": 8,
            "stats": {"steps_per_target_call": 1.875},
            "calls_over_plain": 0.5,
            "differences": [],
            "improvement": IMPROVEMENT,
        }
    ],
}


ESTIMATE = {
    "what": "compiler's memory analysis, ahead of time; not a measurement",
    "topology": "v4:2x2x1",
    "target": "t5_1_1/xxl",
    "drafter": "t5_1_1/small",
    "gamma": 7,
    "batch_size": 1,
    "dtype": "bfloat16",
    "weights_gb": 22.44,
    "needed_gb": 23.36,
    "memory_gb": 32.0,
    "fits": True,
    "copied_in_loops": ["f32[2,3]"],
    "mesh": None,
    "jax": "0.10.2",
    "times": {
        "what": "the compiler's own estimate; not a measurement",
        "rows": [
            {
                "task": "EnDe",
                "drafter": "t5_1_1/small",
                "temperature": 0,
                "gamma": 7,
                "alpha_paper": 0.75,
                "c_paper": 0.02,
                "expected_paper": 3.2,
                "measured_paper": 3.4,
                "as compiled": {"c": 0.0156, "v": 0.75, "improvement": 3.25},
                "as for two positions": {"c": 0.0312, "v": 1.125, "improvement": 2.5},
            }
        ],
    },
}


AGAINST = {
    "name": "t5x",
    "improvement": {"plain": IMPROVEMENT, "gamma 3": IMPROVEMENT | {"median": 1.625}},
    "differences": [{}],
}


ACCELERATOR = {
    "accelerator_report": 1,
    "machine": MACHINE | {"device": "gpu: NVIDIA H100, 1"},
    "flags": "",
    "options": {
        "drafter": "t5_1_1/small",
        "dtype": "bfloat16",
        "tiny": False,
        "gamma": 7,
        "input_length": 128,
        "max_new_tokens": 64,
    },
    "plan": [
        "copy",
        "xxl, call over 8",
        "xxl, plain",
        "xxl, alpha 0.75",
        "xxl, int8",
        "xxl, beams",
        "xxl, T5X",
        "xxl, call over 1",
        "xxl, int8, call over 1",
        "xxl, int8, plain",
        "xxl, int8, alpha 0.75",
        "xxl, self:int8",
    ],
    "figures": [
        {"figure": "copy", "kind": "copy", "milliseconds": IMPROVEMENT, "gb_per_second": 3100.0},
        {
            "figure": "xxl, call over 8",
            "kind": "call",
            "target": "t5_1_1/xxl",
            "batch": 1,
            "width": 8,
            "milliseconds": IMPROVEMENT,
            "v": 1.0625,
        },
        {
            "figure": "xxl, plain",
            "kind": "plain",
            "target": "t5_1_1/xxl",
            "batch": 1,
            "milliseconds": IMPROVEMENT,
            "tokens_per_second": 250.0,
        },
        {
            "figure": "xxl, alpha 0.75",
            "kind": "speculative",
            "target": "t5_1_1/xxl",
            "batch": 1,
            "alpha": 0.75,
            "gamma": 7,
            "milliseconds": IMPROVEMENT,
            "improvement": 3.125,
            "iteration_ms": 4.5,
            "tokens_per_second": 750.0,
        },
        {
            "figure": "xxl, int8",
            "kind": "int8 call",
            "target": "t5_1_1/xxl",
            "unsupported": "bfloat16",
        },
        {
            "figure": "xxl, beams",
            "kind": "beams",
            "target": "t5_1_1/xxl",
            "failed": "RESOURCE_EXHAUSTED",
        },
        {
            "figure": "xxl, call over 1",
            "kind": "call",
            "target": "t5_1_1/xxl",
            "batch": 1,
            "width": 1,
            "milliseconds": IMPROVEMENT,
            "v": 1.0,
            "bytes": 9_600_000_000,
            "floor_ms": 1.2345,
        },
        {
            "figure": "xxl, int8, call over 1",
            "kind": "int8 call",
            "target": "t5_1_1/xxl",
            "batch": 1,
            "width": 1,
            "milliseconds": IMPROVEMENT,
            "over_full": 0.625,
            "bytes": 4_800_000_000,
            "floor_ms": 0.6789,
        },
        {
            "figure": "xxl, int8, plain",
            "kind": "int8 plain",
            "target": "t5_1_1/xxl",
            "batch": 1,
            "milliseconds": IMPROVEMENT,
            "tokens_per_second": 400.0,
            "over_full_plain": 1.625,
        },
        {
            "figure": "xxl, int8, alpha 0.75",
            "kind": "int8 speculative",
            "target": "t5_1_1/xxl",
            "batch": 1,
            "alpha": 0.75,
            "gamma": 7,
            "milliseconds": IMPROVEMENT,
            "improvement": 2.5,
            "over_full_plain": 4.0625,
            "iteration_ms": 3.5,
            "tokens_per_second": 900.0,
        },
        {
            "figure": "xxl, self:int8",
            "kind": "self:int8",
            "target": "t5_1_1/xxl",
            "batch": 1,
            "alpha": 0.99,
            "gamma": 7,
            "acceptance": "synthetic",
            "milliseconds": IMPROVEMENT,
            "improvement": 1.75,
            "iteration_ms": 8.5,
            "tokens_per_second": 400.0,
        },
    ],
}
