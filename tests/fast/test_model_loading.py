"""Models that several threads load at once keep their tied weights, and so do those that are loaded afterwards."""

from concurrent.futures import ThreadPoolExecutor

from headrace.deploy.model_weights import check_weights_fit
from headrace.trainer.model import load_folder


def test_threads_may_load_at_once(lookup_model):
    def load(number: int) -> bool:
        if number % 2:
            check_weights_fit(lookup_model)
            return True
        model = load_folder(lookup_model)
        return model.lm_head.weight is model.model.embed_tokens.weight

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(load, range(24)))
    assert load(0) and load(1)
