"""What D checks before it believes a word of `kv_transfer_params`."""

import pytest
from msgspec.structs import replace

from connector.pd.params import REQUIRED, ParamsSigner, check_remote_prefill, prompt_digest
from engine.errors import KVTransferParamsError
from engine.types import GenerateRequest, KVTransferParams

PARAMS = KVTransferParams(
    do_remote_prefill=True,
    remote_engine_id="prefill-ab",
    remote_request_id="cmpl-1",
    remote_block_ids=((1, 2), (7,)),
    remote_host="127.0.0.1",
    remote_port=5600,
    remote_num_tokens=3,
    remote_prompt_digest=prompt_digest((1, 2, 3)),
    first_token_ids=(9,),
    signature="00ff",
)
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


def test_another_prompt_is_refused() -> None:
    with pytest.raises(KVTransferParamsError, match="3 tokens but this prompt has 2"):
        check_remote_prefill(replace(REQUEST, prompt_token_ids=(1, 2)), PARAMS)
    with pytest.raises(KVTransferParamsError, match="another prompt of the same length"):
        check_remote_prefill(replace(REQUEST, prompt_token_ids=(1, 2, 4)), PARAMS)


@pytest.mark.parametrize(
    "change", [{"remote_host": "127.0.0.2"}, {"remote_num_tokens": 4}, {"signature": None}]
)
def test_a_changed_object_is_refused(change: dict[str, object]) -> None:
    signer = ParamsSigner("token")
    signed = signer.sign(PARAMS)
    signer.verify(signed)
    with pytest.raises(KVTransferParamsError, match="changed on the way"):
        signer.verify(replace(signed, **change))


def test_another_cluster_s_object_is_refused() -> None:
    with pytest.raises(KVTransferParamsError, match="not issued"):
        ParamsSigner("ours").verify(ParamsSigner("theirs").sign(PARAMS))


@pytest.mark.parametrize("host", ["10.0.0.1", "node-7", "::ffff:10.0.0.1"])
def test_without_a_token_only_this_machine_is_believed(host: str) -> None:
    signer = ParamsSigner(None)
    signer.verify(signer.sign(replace(PARAMS, remote_host="::1")))
    with pytest.raises(KVTransferParamsError, match="not this machine"):
        signer.verify(signer.sign(replace(PARAMS, remote_host=host)))
