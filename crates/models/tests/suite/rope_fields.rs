//! The rope fields of `config.json`: contradictions and numbers beyond their limits are refused.

use std::path::Path;

use kv_models::{gpt_oss::GptOss, llama::Llama, load};
use serde_json::{Value as Json, json};

use crate::common::{assert_contains, device, failure, tiny, with_config};

/// A change to a configuration.
type Change = fn(&mut Json);

const LLAMA: &str = "llama3-rope-tiny";
const YARN: &str = "deepseek_v3-tiny";

#[test]
fn wrong_rope_fields_are_named() {
    let cases: [(&str, Change, &[&str]); 14] = [
        (
            LLAMA,
            |c| {
                c["rope_scaling"] = c["rope_parameters"].clone();
                c["rope_scaling"]["factor"] = json!(2.0);
            },
            &["rope_scaling.factor = 2.0", "rope_parameters.factor is 8.0", "keep one"],
        ),
        (
            LLAMA,
            |c| c["rope_scaling"] = json!({"type": "linear", "factor": 8.0}),
            &["rope_scaling.rope_type = \"linear\"", "rope_parameters.rope_type is \"llama3\""],
        ),
        (
            "gemma3-tiny",
            |c| c["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0}),
            &["rope_scaling.rope_type", "keep one of the two objects"],
        ),
        (
            YARN,
            |c| drop(c["rope_parameters"].as_object_mut().unwrap().remove("rope_type")),
            &["rope_scaling.rope_type = missing", "the rope type that factor belongs to"],
        ),
        (
            "gpt-oss-tiny",
            |c| {
                drop(c["rope_parameters"].as_object_mut().unwrap().remove("rope_type"));
                c["rope_theta"] = json!(150_000.0);
            },
            &["rope_scaling.rope_type = missing", "the rope type that factor belongs to"],
        ),
        (
            YARN,
            |c| c["rope_parameters"]["rope_type"] = json!("foo"),
            &["unsupported rope type foo", "longrope and yarn are supported"],
        ),
        (
            YARN,
            |c| c["rope_parameters"]["rope_type"] = json!("linear"),
            &["rope_scaling.mscale_all_dim = 1", "must be 0 with another rope_type"],
        ),
        (
            YARN,
            |c| c["rope_parameters"]["mscale"] = json!(-1.0),
            &["rope_scaling.mscale = -1", "must be at least 0"],
        ),
        (
            YARN,
            |c| c["rope_parameters"]["factor"] = json!(1e300),
            &["rope_scaling.factor = 1e300", "finite and above 0 in f32"],
        ),
        (
            LLAMA,
            |c| c["rms_norm_eps"] = json!(1e-300),
            &["rms_norm_eps = 1e-300", "finite and above 0 in f32"],
        ),
        (
            LLAMA,
            |c| c["rope_parameters"]["rope_theta"] = json!(1e-44),
            &["rope angles = not finite", "correct rope_theta"],
        ),
        (LLAMA, |c| c["rope_parameters"] = json!([]), &["rope_parameters = []", "an object"]),
        (
            LLAMA,
            |c| c["rope_parameters"]["factor"] = json!("x"),
            &["rope_parameters.factor = \"x\"", "must be a number"],
        ),
        (
            "phi4-tiny",
            |c| c["rope_parameters"]["short_factor"][2] = json!(true),
            &["rope_parameters.short_factor[2] = true", "must be a number"],
        ),
    ];
    for (name, change, parts) in cases {
        let folder = with_config(name, change);
        let message = failure(folder.path());
        assert_contains(&message, parts);
        assert!(!message.contains("struct"), "{message}");
    }
}

/// transformers 4 writes the type under both of its names, and some tools write both objects.
#[test]
fn fields_under_two_names_load_if_they_agree() {
    let folder = with_config(LLAMA, |c| {
        c["rope_parameters"]["type"] = json!("llama3");
        c["rope_scaling"] = c["rope_parameters"].clone();
        for field in ["rope_theta", "rope_type"] {
            drop(c["rope_scaling"].as_object_mut().unwrap().remove(field));
        }
    });
    let config = |path: &Path| {
        let model = load(path, &device()).unwrap().model;
        model.downcast_ref::<Llama>().unwrap().config().clone()
    };
    assert_eq!(config(folder.path()), config(&tiny(LLAMA)));

    // As published.
    let name = "gpt-oss-tiny";
    let folder = with_config(name, |c| c["experts_per_token"] = c["num_experts_per_tok"].clone());
    let config = |path: &Path| {
        let model = load(path, &device()).unwrap().model;
        model.downcast_ref::<GptOss>().unwrap().config().clone()
    };
    assert_eq!(config(folder.path()), config(&tiny(name)));
}
