"""One engine in one process, told what to do in lines of JSON on stdin; answers are lines of JSON on stdout.

    python benchmarks/peers.py colibri CONTAINER '{"threads": 2, "prompt": 512}'
    python benchmarks/peers.py llama   FILE.gguf '{"threads": 2, "prompt": 512}'
    python benchmarks/peers.py torch   CHECKPOINT '{"threads": 2, "prompt": 512}'
    python benchmarks/peers.py limits  -         '{"threads": 2}'

A process of its own keeps an engine's worker threads out of the others' way: they sleep while another is measured.
Samples are [seconds, held] pairs; held is the share of its threads' time for which they had a core (see
colibri_lab.timing). `Peer` is the other end of the pipe. All engines read the same seeded token ids.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CONTEXT = 16  # tokens before the decoded ones
GROUP = 2  # decoded tokens in a sample


class Peer:
    """A started engine. `ask` sends a command and waits, `close` ends the process. Raises RuntimeError when it dies."""

    def __init__(self, kind: str, path: str | Path, python: str = sys.executable, **options):
        self.name = f"{kind} {Path(path).name}"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [python, str(Path(__file__).resolve()), kind, str(path), json.dumps(options)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()

    def ask(self, command: str, **options):
        self.process.stdin.write(json.dumps({"command": command, **options}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}; its message is above")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def token_ids(vocab: int, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(2, vocab, count)


class Engine:
    """What every engine can be asked. Subclasses say how to forget, how to run tokens, and how to return all logits."""

    def __init__(self, options: dict):
        self.threads, self.prompt, self.most = options["threads"], options["prompt"], options["tokens"]

    def decode(self, tokens: int) -> list[tuple[float, float]]:
        """Seconds per token behind a short context, GROUP tokens a sample."""
        self.forget()
        self.run(self.ids[:CONTEXT])
        self.run(self.ids[CONTEXT : CONTEXT + 1])
        found = []
        for at in range(CONTEXT + 1, CONTEXT + 1 + tokens, GROUP):
            with self.watch() as watch:
                for i in range(at, at + GROUP):
                    self.run(self.ids[i : i + 1])
            found.append((watch.seconds / GROUP, watch.held))
        return found

    def prefill(self) -> list[tuple[float, float]]:
        """Seconds per token of the prompt, one sample."""
        self.forget()
        with self.watch() as watch:
            self.run(self.ids[: self.prompt])
        return [(watch.seconds / self.prompt, watch.held)]

    def logits(self, count: int, path: str) -> list[int]:
        """Logits (count, vocab) to a .npy file; their argmax."""
        self.forget()
        found = self.all_logits(self.ids[:count])
        np.save(path, found)
        return found.argmax(1).tolist()

    def watch(self):
        from colibri_lab.timing import Stopwatch

        return Stopwatch(self.threads)


class Colibri(Engine):
    def __init__(self, path: str, options: dict):
        import colibri_lab as cl
        from colibri_lab.bench import all_resident

        super().__init__(options)
        own = {"prefill_chunk": self.prompt, "threads": self.threads, "max_seq_len": self.prompt + self.most + 64}
        given = options.get("settings", {})
        resident = {} if "expert_cache_slots" in given else all_resident(path)
        self.lab = cl.open(path, **own, **resident, **given)
        self.engine = self.lab.engine
        self.ids = token_ids(self.lab.config.vocab_size, self.prompt + self.most + CONTEXT)
        self.prefill()

    def about(self) -> dict:
        from colibri_lab import __version__
        from colibri_lab.bench import token_bytes

        s = self.lab.settings
        return {
            "engine": f"colibri-lab {__version__}", "token_bytes": token_bytes(self.lab, CONTEXT + self.most // 2),
            "settings": {k: s[k] for k in ("threads", "activations", "simd", "kv_dtype", "gemm_block_size", "backend")},
            "summary": self.lab.summary(),
        }  # fmt: skip

    def forget(self) -> None:
        self.engine.kv.release()

    def run(self, ids: np.ndarray) -> None:
        self.engine.forward(ids, "decode" if len(ids) == 1 else "prefill")

    def all_logits(self, ids: np.ndarray) -> np.ndarray:
        return self.lab.logits(ids)

    def stream(self, tokens: int) -> dict:
        """Decode with experts coming from files; seconds per token in all, waiting, of loader service, and hit rate."""
        run = self.lab.generate("a", max_tokens=tokens + 1, temperature=1.0, top_p=1.0, stop_at_eos=False)
        steps = [s for s in run.steps if s.phase == "decode"]
        wait = sum(s.stages.get("expert_load_wait", 0.0) for s in steps)
        wall = sum(s.wall_s for s in steps)
        return {
            "wall_s": wall / len(steps), "compute_s": (wall - wait) / len(steps), "wait_s": wait / len(steps),
            "service_s": sum(s.load_service_s or 0.0 for s in steps) / len(steps),
            "lanes": self.lab.settings["loader_threads"], "misses": sum(s.misses for s in steps) / len(steps),
            "device_bytes": sum(s.device_bytes or 0 for s in steps) / len(steps), "hit_rate": run.hit_rate,
        }  # fmt: skip


class Llama(Engine):
    """llama.cpp through llama-cpp-python's C interface."""

    def __init__(self, path: str, options: dict):
        import llama_cpp

        super().__init__(options)
        self.c = c = llama_cpp
        self._silence = c.llama_log_callback(lambda *_: None)  # must live: the library keeps only its address
        c.llama_log_set(self._silence, None)
        c.llama_backend_init()
        settings = c.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = c.llama_model_load_from_file(path.encode(), settings)
        if not self.model:
            raise RuntimeError(f"{path}: llama.cpp cannot load it")
        wanted = c.llama_context_default_params()
        wanted.n_ctx = self.prompt + self.most + 64
        wanted.n_batch = wanted.n_ubatch = max(self.prompt, 32)
        wanted.n_threads = wanted.n_threads_batch = self.threads
        self.context = c.llama_init_from_model(self.model, wanted)
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.ids = token_ids(self.vocab, self.prompt + self.most + CONTEXT)
        self.prefill()  # warms up, and repacks weights where it does

    def about(self) -> dict:
        said = self.c.llama_print_system_info().decode()
        return {"engine": f"llama-cpp-python {self.c.__version__}", "system": said}

    def forget(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def run(self, ids: np.ndarray) -> None:
        tokens = (self.c.llama_token * len(ids))(*ids.tolist())
        self._done(self.c.llama_decode(self.context, self.c.llama_batch_get_one(tokens, len(ids))))
        self.c.llama_get_logits_ith(self.context, -1)  # waits for the result

    def all_logits(self, ids: np.ndarray) -> np.ndarray:
        batch = self.c.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
        self._done(self.c.llama_decode(self.context, batch))
        rows = [self.c.llama_get_logits_ith(self.context, i) for i in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (self.vocab,)).copy() for row in rows])

    def _done(self, code: int) -> None:
        if code:
            raise RuntimeError(f"llama_decode failed with code {code}")


class Torch(Engine):
    """transformers in float32, the fastest of its formats at prefill on such CPUs."""

    def __init__(self, path: str, options: dict):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        import transformers

        super().__init__(options)
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.ids = token_ids(self.model.config.vocab_size, self.prompt + self.most + CONTEXT)
        self.past = None
        self.prefill()

    def about(self) -> dict:
        return {"engine": f"transformers {self.transformers.__version__}, torch {self.torch.__version__}, float32"}

    def forget(self) -> None:
        self.past = None

    def run(self, ids: np.ndarray) -> None:
        tokens = self.torch.from_numpy(ids)[None]
        self.past = self.model(tokens, past_key_values=self.past, use_cache=True, logits_to_keep=1).past_key_values

    def all_logits(self, ids: np.ndarray) -> np.ndarray:
        return self.model(self.torch.from_numpy(ids)[None]).logits[0].numpy()


class LimitsOf:
    """The machine's limits, one round an ask: [seconds per byte or operation, held] of each."""

    def __init__(self, _: str, options: dict):
        from colibri_lab.limits import LimitWork

        self.work = LimitWork(options["threads"])

    def about(self) -> dict:
        return {"simd": self.work.limits(self._race()).simd}

    def measure(self) -> dict:
        limits = self.work.limits(self._race())
        found = {"read": limits.read, "fma": limits.fma, "dots": limits.dots}
        return {name: [(s.seconds, s.held) for s in t.samples] for name, t in found.items() if t is not None}

    def _race(self) -> dict:
        from colibri_lab.timing import race

        return race(self.work.contenders, rounds=1, patience=1, threads=self.work.threads)


KINDS = {"colibri": Colibri, "llama": Llama, "torch": Torch, "limits": LimitsOf}


def main() -> int:
    kind, path, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    engine = KINDS[kind](path, options)
    print(json.dumps(engine.about()), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        result = getattr(engine, command.pop("command"))(**command)
        print(json.dumps(result), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
