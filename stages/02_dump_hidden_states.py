"""Stage 2: prefill every sample in the engine and keep the hidden states that the drafter reads and learns from.

Reads:   runs/<name>/prompts/samples.parquet
Writes:  runs/<name>/dump/{shard-*.safetensors,probes.safetensors,quarantine.jsonl}
Launch:  make dump                                        # SGLang on the CPU, or on the GPU where there is one
         make dump ARGS="slots.layers=[2,15,27]"
         make dump RUN=kimi GPUS=8 ARGS="target=kimi_k25 target.path=/models/Kimi-K2.5"
"""

from _stage import stage_main, without

from pipeline.config import section
from pipeline.slots import layers_to_dump, rebound


def depends_on(config, manifest):
    dump = without(section(config, "dump")["dump"], "layers", "chunked_prefill_size", "max_running_requests",
                   "disk_reserve_gib", "mem_fraction_static", "allow_untested_engine")
    return {"dump": dump, "layers": layers_to_dump(config, manifest)[1], "context_length": config.target.context_length}


def work(config, target, manifest, run_dir, folder):
    from pipeline.dump.dump import dump

    slots, layers = layers_to_dump(config, manifest)
    return dump(config, target, manifest, run_dir, folder, slot_layers=slots, layers=layers)


def when_current(config, manifest):
    """The layers asked for are dumped already, but the slots may be bound to others of them."""
    asked = layers_to_dump(config, manifest)[0]
    if asked == manifest.fc_layers():
        return False
    print(f"dump: slots bound to {asked} instead of {manifest.fc_layers()}; next: make standardize")
    manifest.slots = rebound(manifest, asked)
    return True


if __name__ == "__main__":
    stage_main("dump", depends_on, work, when_current)
