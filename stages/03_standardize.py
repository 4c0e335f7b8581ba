"""Stage 3: bind dumped states to slots, check them, and add what training needs: masks, draft vocabulary, teacher argmax.

Reads:   runs/<name>/prompts/samples.parquet, runs/<name>/dump/
Writes:  runs/<name>/standardize/{shard-*.safetensors,vocab.safetensors,split.json}; hidden states are not copied
Launch:  make standardize
         make standardize ARGS="slots.layers=[2,15,27]"   # re-bind, if these layers were dumped
"""

from _stage import stage_main

from pipeline.slots import layers_to_bind


def depends_on(config, manifest):
    layers = layers_to_bind(config, manifest) if manifest and manifest.dump else config.slots.layers
    return {"layers": layers, "draft_vocab_size": config.drafter.draft_vocab_size}


def work(config, target, manifest, run_dir, folder):
    from pipeline.standardize import standardize

    return standardize(config, target, manifest, run_dir, folder)


if __name__ == "__main__":
    stage_main("standardize", depends_on, work)
