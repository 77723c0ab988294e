"""A rollout server for tests: transformers' own sampling behind verl's server interface."""

import asyncio
import logging
import os

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

NAME = "hf_server_{}"
REPEATABLE = os.environ.get("ROLLOUT_REPEATABLE") == "1"
"""One response at a time, drawn by its prompt and step alone, whoever asks first."""


class Adapter(BaseRollout):
    """The trainer's side: hands the weights over; or that of a server on devices of its own."""

    def __init__(self, *args, replica_rank=-1, **kwargs):
        super().__init__(*args, **kwargs)
        self.replica_rank = replica_rank

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, wire_format="named_tensors", **kwargs):
        state = {
            name: x.detach().float().numpy().copy()
            async for name, x in ensure_async_iterator(weights)
        }
        size = self.config.tensor_model_parallel_size
        rank = torch.distributed.get_rank()
        if rank % size == 0:
            replica = rank // size if self.replica_rank < 0 else self.replica_rank
            server = ray.get_actor(NAME.format(replica))
            await server.load_weights.remote(state, kwargs.get("global_steps"))


class Replica(RolloutReplica):
    async def launch_servers(self):
        options = {"name": NAME.format(self.replica_rank), "num_cpus": 0}
        server = ray.remote(Server).options(**options).remote(self.config, self.model_config)
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"hf-{self.replica_rank}"
        await server.ready.remote()


class Server:
    """Collects what is asked within a moment and answers it as one batch."""

    def __init__(self, config, model_config):
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        torch.set_num_threads(1)
        torch.manual_seed(config.seed)
        self.config = config
        self.path = model_config.path
        hf_config = AutoConfig.from_pretrained(self.path)
        self.vision = hasattr(hf_config, "vision_config")
        kind = AutoModelForImageTextToText if self.vision else AutoModelForCausalLM
        self.model = kind.from_pretrained(self.path, dtype=torch.float32).eval()
        self.pad = hf_config.get_text_config().pad_token_id
        self.eos = hf_config.get_text_config().eos_token_id
        self.step = 0
        self.waiting = []
        self.worker = None
        self.rejecting = False
        self.open = asyncio.Event()
        self.open.set()

    async def ready(self):
        return True

    async def load_weights(self, state, step):
        loaded = {name: torch.from_numpy(x) for name, x in state.items()}
        missing = self.model.load_state_dict(loaded, strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys[:3]
        self.step = step if step is not None else self.step

    async def sleep(self):
        pass

    async def wake_up(self):
        pass

    async def release_kv_cache(self):
        pass

    async def resume_kv_cache(self):
        pass

    async def abort_all_requests(self, reject_request=False):
        self.rejecting = reject_request
        if reject_request:
            self.open.set()  # who waits is sent to another server
        else:
            self.open.clear()

    async def resume_generation(self):
        self.rejecting = False
        self.open.set()

    async def generate(
        self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None, **kwargs
    ):
        await self.open.wait()
        if self.rejecting:
            fields = {"global_steps": self.step}
            return TokenOutput(
                token_ids=[], log_probs=[], stop_reason="aborted", extra_fields=fields
            )
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), dict(sampling_params), image_data, answer))
        if self.worker is None:
            self.worker = asyncio.create_task(self._drain())
        return await answer

    async def _drain(self):
        await asyncio.sleep(0.1)
        batch, self.waiting = self.waiting, []
        self.worker = None
        parts = [[item] for item in batch] if REPEATABLE else [batch]
        try:
            outputs = [output for part in parts for output in self._sample(part)]
            for output, item in zip(outputs, batch, strict=True):
                item[3].set_result(output)
        except Exception as error:
            logging.exception("sampling failed")
            for item in batch:
                if not item[3].done():
                    item[3].set_exception(error)

    @torch.inference_mode()
    def _sample(self, batch):
        """Left-padded, one token after the other; the temperature of the first."""
        width = max(len(ids) for ids, *_ in batch)
        tokens = torch.full((len(batch), width), self.pad)
        attention = torch.zeros_like(tokens)
        for row, (ids, *_) in enumerate(batch):
            tokens[row, width - len(ids) :] = torch.tensor(ids)
            attention[row, width - len(ids) :] = 1
        temperature = batch[0][1].get("temperature", 1.0)
        if REPEATABLE:
            torch.manual_seed(sum(x * 31**i for i, x in enumerate(batch[0][0])) % 2**40 + self.step)
        extra = self._vision(batch, tokens) if self.vision else {}
        found = self.model.generate(
            input_ids=tokens,
            attention_mask=attention,
            max_new_tokens=self.config.response_length,
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else None,
            top_k=0,
            top_p=1.0,
            pad_token_id=self.pad,
            eos_token_id=self.eos,
            output_logits=True,
            return_dict_in_generate=True,
            **extra,
        )
        scale = temperature if temperature > 0 else 1.0
        logp = (torch.stack(found.logits, dim=1).float() / scale).log_softmax(dim=-1)
        for row in range(len(batch)):
            ids = found.sequences[row, width:].tolist()
            if self.eos in ids:
                ids = ids[: ids.index(self.eos) + 1]
            yield TokenOutput(
                token_ids=ids,
                log_probs=[float(logp[row, t, x]) for t, x in enumerate(ids)],
                stop_reason="completed",
                extra_fields={"global_steps": self.step},
            )

    def _vision(self, batch, tokens):
        from tiny_vision import image_processor

        images = [image for _, _, images, _ in batch for image in images or []]
        inputs = dict(image_processor(self.path)(images=images, return_tensors="pt"))
        kinds = torch.zeros_like(tokens)
        kinds[tokens == self.model.config.image_token_id] = 1
        config = self.model.config  # a policy that writes these could not be scored
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        banned = [getattr(config, name) for name in names]
        return {**inputs, "mm_token_type_ids": kinds, "suppress_tokens": banned}
