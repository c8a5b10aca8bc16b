"""An OpenAI-style server for one base model and its adapters; the `server` extra, started by `hotslot serve`.

    settings -> service -> app        what was asked for; what runs; what HTTP sees of it
    sources, admission, loading       which adapters there are; whose turn it is; how they get into a slot
    engine: paged | batches           rows of all requests in one batch, each with its own adapter
    sequence, sampling, text          one row: its tokens, how the next is chosen, its text
    metrics, events                   what Prometheus and the page see

Of what lies outside this folder only the command line and `hotslot.ray` import it; the core package works without its dependencies.
"""
