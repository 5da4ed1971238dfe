"""Loads model name, tokenizer and context length from a node: the proxy has no model folder."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import structlog

from engine.errors import TandemError
from proxy.cluster.node_pool import NodePool
from serving.api.served_model import ServedModel, load_sampling_defaults
from serving.api.tokenizer import load_tokenizer
from serving.config import ServerConfig
from serving.rpc.messages import TOKENIZER_FILES, NodeInfo

log = structlog.get_logger()

RETRY_INTERVAL_S: Final = 0.5
FETCH_TIMEOUT_S: Final = 30.0


async def load_serving(
    pool: NodePool, config: ServerConfig, chat_template: str | None
) -> ServedModel:
    """Waits, without limit, until a usable node, D before P, has sent its tokenizer.

    Names and the chat template's text are the nodes' own where `config` has none.
    """
    while True:
        for node in pool.nodes:
            # Taken now: what a node in use has said is checked, and it may say something else
            # meanwhile.
            info = node.info
            if not node.is_available:
                continue
            try:
                files = await node.worker.get_tokenizer(FETCH_TIMEOUT_S)
                served = await asyncio.to_thread(
                    _build_serving, files, info, config, chat_template=chat_template
                )
            except TandemError as error:
                log.warning("no tokenizer from node", node=node.name, problem=str(error))
                continue
            log.info("model is known", model=served.model_name, tokenizer_of=node.name)
            return served
        await pool.wait_for_news(RETRY_INTERVAL_S)


def _build_serving(
    files: Mapping[str, bytes], info: NodeInfo, config: ServerConfig, *, chat_template: str | None
) -> ServedModel:
    with TemporaryDirectory(prefix="tandem-tokenizer-") as name:
        folder = Path(name)
        # File names come from a peer, so only the known ones ever become paths.
        for file_name in TOKENIZER_FILES:
            if file_name in files:
                (folder / file_name).parent.mkdir(exist_ok=True)
                (folder / file_name).write_bytes(files[file_name])
        content_format = config.chat_template_content_format
        return ServedModel(
            served_model_names=config.served_model_name or info.model_names,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            tokenizer=load_tokenizer(folder, chat_template, content_format),
            defaults=load_sampling_defaults(folder),
            root=info.root or info.model_names[0],
        )
