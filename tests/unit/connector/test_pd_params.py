"""Checks that P and D make before they believe a word of `kv_transfer_params`."""

import pytest
from msgspec.structs import replace

from connector.pd.wire.params import (
    REQUIRED,
    REQUIRED_TO_RETURN,
    ParamsSigner,
    check_details,
    check_remote_prefill,
    check_return_pull,
    why_not_from,
)
from engine.errors import KVTransferParamsError
from engine.kv_cache.prefix import PrefixHasher
from engine.types import GenerateRequest, KVTransferParams
from serving.rpc.proof import signing_key

HASHER = PrefixHasher(16)
PARAMS = KVTransferParams(
    do_remote_prefill=True,
    remote_engine_id="prefill-ab",
    remote_request_id="cmpl-1",
    remote_block_ids=((1, 2), (7,)),
    remote_generation=1,
    remote_host="127.0.0.1",
    remote_port=5600,
    remote_num_tokens=3,
    remote_prompt_digest=HASHER.digest((1, 2, 3), None).hex(),
    first_token_ids=(9,),
    signature="00ff",
)
KEPT = replace(PARAMS, do_remote_prefill=False, do_remote_decode=True, first_token_ids=None)
REQUEST = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3))


def test_p_s_answer_is_accepted_as_it_is() -> None:
    check_remote_prefill(REQUEST, PARAMS)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(KVTransferParamsError, match=f"needs {name}") as caught:
        check_remote_prefill(REQUEST, replace(PARAMS, **{name: None}))
    assert caught.value.code == "partial_kv_transfer_params"


def test_prefill_here_and_decode_elsewhere_exclude_each_other() -> None:
    with pytest.raises(KVTransferParamsError, match="exclude each other"):
        check_remote_prefill(REQUEST, replace(PARAMS, do_remote_decode=True))


def test_a_prompt_of_another_length_is_refused() -> None:
    with pytest.raises(KVTransferParamsError, match="3 tokens but this prompt has 2"):
        check_remote_prefill(replace(REQUEST, prompt_token_ids=(1, 2)), PARAMS)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "127.0.0.2"},
        {"remote_num_tokens": 4},
        {"remote_filled_from": (0, 16)},
        {"signature": None},
    ],
)
def test_a_changed_object_is_refused(change: dict[str, object]) -> None:
    signer = ParamsSigner(signing_key("token"))
    signed = signer.sign(PARAMS)
    signer.verify(signed)
    with pytest.raises(KVTransferParamsError, match="changed on the way"):
        signer.verify(replace(signed, **change))


def test_another_cluster_s_object_is_refused() -> None:
    with pytest.raises(KVTransferParamsError, match="not issued"):
        ParamsSigner(signing_key("ours")).verify(ParamsSigner(signing_key("theirs")).sign(PARAMS))


@pytest.mark.parametrize("host", ["10.0.0.1", "node-7", "::ffff:10.0.0.1"])
def test_without_a_token_only_this_machine_is_believed(host: str) -> None:
    signer = ParamsSigner(None)
    signer.verify(signer.sign(replace(PARAMS, remote_host="::1")))
    with pytest.raises(KVTransferParamsError, match="not this machine"):
        signer.verify(signer.sign(replace(PARAMS, remote_host=host)))


def test_d_s_answer_is_accepted_as_it_is() -> None:
    check_details(KEPT)
    check_return_pull(KEPT)


@pytest.mark.parametrize("name", REQUIRED_TO_RETURN)
def test_a_missing_field_of_d_s_answer_is_named(name: str) -> None:
    with pytest.raises(KVTransferParamsError, match=f"needs {name}") as caught:
        check_return_pull(replace(KEPT, **{name: None}))
    assert caught.value.code == "partial_kv_transfer_params"


@pytest.mark.parametrize(
    "params",
    [
        replace(KEPT, first_token_ids=(9,)),
        replace(KEPT, remote_engine_id=None),
        replace(KEPT, do_remote_decode=False),
        KVTransferParams(do_remote_decode=True, remote_host="127.0.0.1"),
    ],
    ids=["first token", "no engine", "no flag", "only a host"],
)
def test_details_are_accepted_only_with_what_they_belong_to(params: KVTransferParams) -> None:
    with pytest.raises(KVTransferParamsError, match="only accepted with do_remote_prefill=true"):
        check_details(params)


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        ((1, 2, 3, 4), None),
        ((1, 2, 3, 4, 5), None),
        ((1, 2, 3), "not_longer"),
        ((1, 2), "not_longer"),
        ((1, 2, 4, 3), "other_tokens"),
        ((4, 2, 3, 1), "other_tokens"),
        ((1, 2, 2, 3), "other_tokens"),
    ],
)
def test_a_prompt_goes_on_from_exactly_the_tokens_that_d_has_computed(
    prompt: tuple[int, ...], cause: str | None
) -> None:
    assert why_not_from(replace(REQUEST, prompt_token_ids=prompt), KEPT, HASHER) == cause


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_a_count_that_is_not_the_digest_s_is_found(num_tokens: int) -> None:
    longer = replace(REQUEST, prompt_token_ids=(1, 2, 3, 4, 5))
    assert why_not_from(longer, KEPT, HASHER) is None
    assert (
        why_not_from(longer, replace(KEPT, remote_num_tokens=num_tokens), HASHER) == "other_tokens"
    )
