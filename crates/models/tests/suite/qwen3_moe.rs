//! Qwen3-MoE: every field of the router counts. The golden tests compare its logits with the
//! transformers library's.

use std::path::Path;

use burn::tensor::Tensor;
use kv_models::{kv_cubecl::KvCacheConfig, load};
use serde_json::{Value as Json, json};

use crate::common::{device, expected, max_difference, tiny, with_config};

const NAME: &str = "qwen3_moe-tiny";

fn logits(folder: &Path) -> Tensor<3> {
    let device = device();
    let model = load(folder, &device).unwrap().model;
    model.forward(expected(&tiny(NAME), &device).ids, KvCacheConfig::float()).unwrap()
}

/// Another number of experts, and weights that are not divided by their sum, change the logits by
/// far more than the golden tests allow.
#[test]
fn every_field_of_the_router_counts() {
    let right = logits(&tiny(NAME));
    let largest = right.clone().abs().max().into_scalar::<f32>();
    let changes: [fn(&mut Json); 2] =
        [|c| c["num_experts_per_tok"] = json!(2), |c| c["norm_topk_prob"] = json!(false)];
    for change in changes {
        let folder = with_config(NAME, change);
        let worst = max_difference(logits(folder.path()), right.clone());
        assert!(worst > 0.01 * largest, "{worst} of {largest}");
    }
}
