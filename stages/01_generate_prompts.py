"""Stage 1: conversations from a source, answered by the target → token ids and loss mask.

Reads:   `prompts.source` and the target's tokenizer (and weights, when the target answers).
Writes:  runs/<name>/prompts/{samples.parquet,skipped.jsonl,quarantine.jsonl}; answers as they come: runs/<name>/responses/
Launch:  make prompts                                     # embedded target and prompts, on a laptop
         make prompts RUN=llama ARGS="target=llama31_8b prompts=sglang prompts.source=ultrachat.jsonl"
"""

from _stage import stage_main, without

from pipeline.config import section


def depends_on(config, manifest):
    from pipeline.prompts.sources import fingerprint

    prompts = without(section(config, "prompts")["prompts"], "workers", "base_url", "server_model", "api_key_env",
                      "concurrency", "request_timeout", "retries")
    return {"context_length": config.target.context_length, "source_sha256": fingerprint(config.prompts),
            "prompts": prompts}


def work(config, target, manifest, run_dir, folder):
    from pipeline.prompts import generate

    return generate(config, target, folder)


if __name__ == "__main__":
    stage_main("prompts", depends_on, work)
