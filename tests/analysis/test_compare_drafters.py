"""Tests `scripts/compare_drafters.py`: what a variant's text means, and which are rejected."""

import pytest
from absl.flags import FLAGS


@pytest.fixture
def script(load_script):
    script = load_script("compare_drafters")
    FLAGS(["compare_drafters.py", "--input_file=x", "--variant=x", "--max_new_tokens=9"])
    return script


def test_a_variant_sets_options_of_drafting(script):
    options, gamma = script.read_variant("a,gamma=3,shortlist_size=12,drafter_int8,dtype=float32")
    assert (options.drafter, gamma, options.target) == ("a", 3, "ende/target")
    assert (options.shortlist_size, options.drafter_int8, options.dtype) == (12, True, "float32")
    assert options.max_new_tokens == 9 and options.verifier == "token"
    options, gamma = script.read_variant("vertical|a|lookup|2")
    assert (options.drafter, gamma) == ("a", 4)


@pytest.mark.parametrize(
    "settings, message",
    [
        ("gamma=0", "gamma: got 0, expected at least 1"),
        ("gamma=many", "variant: got 'gamma=many', expected a value of gamma"),
        ("drafter_int8=7", "variant: got 'drafter_int8=7', expected a value of drafter_int8"),
        ("temperature=1", "variant: got 'temperature=1' in 'a,temperature=1', expected gamma or"),
        ("drafter=b", "variant: got 'drafter=b'"),
        ("widths=2", "variant: got 'widths=2'"),
    ],
)
def test_a_wrong_variant_is_rejected(script, settings, message):
    with pytest.raises(ValueError, match=message):
        script.read_variant(f"a,{settings}")


def test_variants_share_what_plain_decoding_depends_on(script):
    def check(*variants):
        script.check_alike({variant: script.read_variant(variant) for variant in variants})

    check("a,gamma=3", "b,shortlist_size=4,gamma_policy=heuristic", "lookup")
    for setting in ("quantize=int8", "min_new_tokens=4", "top_k=3", "seed=2", "dtype=float32"):
        message = f"variant: got {setting.partition('=')[0]} .* in 'a' and .*expected the same"
        with pytest.raises(ValueError, match=message):
            check("a", f"a,{setting}")
