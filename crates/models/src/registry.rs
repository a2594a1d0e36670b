//! The families that [`load`](crate::load()) knows.

use std::sync::{PoisonError, RwLock};

use crate::{
    deepseek_v3::DeepseekV3,
    deepseek_v4::DeepseekV4,
    error::{Error, Result},
    family::Family,
    gemma3::Gemma3,
    gemma4::Gemma4,
    gguf::GgufNames,
    gpt_oss::GptOss,
    gpt2::Gpt2,
    llama::Llama,
    mixtral::Mixtral,
    qwen3_5::Qwen35,
    qwen3_moe::Qwen3Moe,
};

static BUILT_IN: &[&dyn Family] = &[
    Gpt2::FAMILY,
    Llama::FAMILY,
    Gemma3::FAMILY,
    GptOss::FAMILY,
    DeepseekV3::FAMILY,
    DeepseekV4::FAMILY,
    Qwen3Moe::FAMILY,
    Mixtral::FAMILY,
    Qwen35::FAMILY,
    Gemma4::FAMILY,
];
static REGISTERED: RwLock<Vec<&'static dyn Family>> = RwLock::new(Vec::new());

/// Makes a family known to [`load`](crate::load()) until the program ends.
///
/// # Errors
/// Fails with [`Error::Argument`] for a `model_type` or a GGUF architecture that a family already
/// has. Nothing of `family` is then registered.
pub fn register(family: &'static dyn Family) -> Result<()> {
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    let known: Vec<_> = BUILT_IN.iter().chain(registered.iter()).copied().collect();
    for (field, names) in [
        ("model_type", model_types as fn(&'static dyn Family) -> Vec<&'static str>),
        ("general.architecture", architectures),
    ] {
        let mut taken: Vec<_> = known.iter().flat_map(|family| names(*family)).collect();
        for name in names(family) {
            if taken.contains(&name) {
                let rule = "is already registered; a name belongs to one family";
                return Err(Error::argument(field, name, rule));
            }
            taken.push(name);
        }
    }
    registered.push(family);
    Ok(())
}

fn model_types(family: &'static dyn Family) -> Vec<&'static str> {
    family.model_types().to_vec()
}

fn architectures(family: &'static dyn Family) -> Vec<&'static str> {
    family.gguf().iter().map(|(arch, _)| *arch).collect()
}

fn families() -> Vec<&'static dyn Family> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    BUILT_IN.iter().chain(registered.iter()).copied().collect()
}

/// Finds the family of a `model_type`.
///
/// # Errors
/// Returns the known `model_type`s as text.
pub(crate) fn by_model_type(name: &str) -> Result<&'static dyn Family, String> {
    let families = families();
    let found = families.iter().find(|family| family.model_types().contains(&name));
    found.copied().ok_or_else(|| in_words(families.into_iter().flat_map(model_types)))
}

/// Finds the family of a GGUF architecture, and the names of its tensors. For files with experts, a
/// family of `NAME with experts` comes first.
///
/// # Errors
/// Returns the known architectures as text.
pub(crate) fn by_architecture(
    name: &str,
    has_experts: bool,
) -> Result<(&'static dyn Family, &'static GgufNames), String> {
    let families = families();
    let find = |name: &str| {
        families.iter().find_map(|family| {
            let (_, names) = family.gguf().iter().find(|(arch, _)| *arch == name)?;
            Some((*family, names))
        })
    };
    let with_experts = has_experts.then(|| find(&format!("{name} with experts"))).flatten();
    with_experts
        .or_else(|| find(name))
        .ok_or_else(|| in_words(families.into_iter().flat_map(architectures)))
}

/// Joins names to `a, b and c`.
fn in_words(names: impl Iterator<Item = &'static str>) -> String {
    let names: Vec<_> = names.collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_both_ways() {
        for (arch, gguf, hf) in [
            ("llama", "token_embd.weight", "embed_tokens.weight"),
            ("llama", "blk.11.attn_q.bias", "layers.11.self_attn.q_proj.bias"),
            ("phi3", "blk.0.ffn_up.weight", "layers.0.mlp.gate_up_proj.weight"),
            ("gpt2", "blk.3.ffn_up.weight", "h.3.mlp.c_fc.weight"),
        ] {
            let (_, names) = by_architecture(arch, false).ok().unwrap();
            assert_eq!(names.to_hugging_face(gguf), hf);
            assert_eq!(names.to_gguf(hf), gguf);
        }
        let (_, llama) = by_architecture("llama", false).ok().unwrap();
        assert_eq!(llama.to_hugging_face("rope_freqs.weight"), "rope_freqs.weight");
    }

    #[test]
    fn experts_select_among_families_of_one_architecture() {
        for (arch, has_experts, model_type) in [
            ("llama", false, "llama"),
            ("llama", true, "mixtral"),
            ("qwen3moe", true, "qwen3_moe"),
            ("qwen2", true, "qwen2"),
        ] {
            let (family, _) = by_architecture(arch, has_experts).ok().unwrap();
            assert!(family.model_types().contains(&model_type), "{arch}");
        }
    }
}
