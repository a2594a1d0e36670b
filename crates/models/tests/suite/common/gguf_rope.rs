//! The tensors of ropes in GGUF files, as llama.cpp's converter writes them.

use serde_json::Value as Json;

use super::gguf_gemma4::global_head_dim;

/// Returns the divisors of rope frequencies, if a file has them.
pub(super) fn divisors(config: &Json) -> Option<Vec<f32>> {
    let rope = &config["rope_parameters"];
    if rope["rope_type"] == "llama3" {
        return Some(llama3_divisors(config));
    }
    let full = &rope["full_attention"];
    let share =
        full["partial_rotary_factor"].as_f64().filter(|_| full["rope_type"] == "proportional")?;
    // Pairs without rope have a large divisor.
    let pairs = global_head_dim(config) as usize / 2;
    let mut divisors = vec![1.0; (pairs as f64 * share) as usize];
    divisors.resize(pairs, 1e30);
    Some(divisors)
}

/// Returns the divisors that llama.cpp's converter stores for `rope_type` llama3.
fn llama3_divisors(config: &Json) -> Vec<f32> {
    let rope = &config["rope_parameters"];
    let get = |key: &str| rope[key].as_f64().unwrap();
    let dim = config["head_dim"].as_u64().unwrap();
    (0..dim / 2)
        .map(|i| {
            let freq = get("rope_theta").powf(-2.0 * i as f64 / dim as f64);
            let wavelength = std::f64::consts::TAU / freq;
            let original = get("original_max_position_embeddings");
            let (low, high) = (get("low_freq_factor"), get("high_freq_factor"));
            let divisor = if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                get("factor")
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / get("factor") + smooth)
            };
            divisor as f32
        })
        .collect()
}

/// Returns the factors of `rope_scaling` as tensors, if the configuration has them.
pub(super) fn longrope_factors(config: &Json) -> Vec<(String, Vec<f32>)> {
    let factors = |kind: &str| {
        let of = |field: &str| config[field][format!("{kind}_factor")].as_array();
        let factors = of("rope_scaling").or_else(|| of("rope_parameters"))?;
        let values = factors.iter().map(|x| x.as_f64().unwrap() as f32).collect();
        Some((format!("rope_factors_{kind}.weight"), values))
    };
    ["short", "long"].into_iter().filter_map(factors).collect()
}
