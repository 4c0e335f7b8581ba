"""Stage 5: drafter directories for SGLang and vLLM, serving.yaml and launch scripts, all derived from the manifest.

Reads:   runs/<name>/train/, runs/<name>/standardize/vocab.safetensors
Writes:  runs/<name>/export/{sglang/,vllm/,serving.yaml,launch_sglang.sh,launch_vllm.sh}
Launch:  make export
         python -m pipeline.export.validate runs/demo/export/sglang   # check any drafter directory
"""

from _stage import engine_facts, stage_main

from pipeline.config import section
from pipeline.slots import check_bound, check_trained


def depends_on(config, manifest):
    check_bound(config, manifest)
    return {"layers": manifest and manifest.fc_layers(), "gpus": config.gpus, **engine_facts(config),
            "mem_fraction_static": config.dump.mem_fraction_static, **section(config, "export", "target")}


def work(config, target, manifest, run_dir, folder):
    from pipeline.export.export import export

    check_trained(manifest)
    return export(config, target, manifest, run_dir, folder)


if __name__ == "__main__":
    stage_main("export", depends_on, work)
