//! Caches shared by all layers that a policy should beat, with any settings.

use kv_cubecl::{KvCacheConfig, KvFormat};
use kv_models::{ModelCacheConfig, ModelSpec};
use serde::Serialize;

use super::{Score, bytes};
use crate::Result;

/// Settings of KIVI caches: the paper's, and smaller ones of the presets. Each is combined with
/// every pair of bits.
const GROUPED: [&str; 4] =
    ["", "-r32-s4-gflush-hadv-f16", "-r64-s4-gflush-hadv-f16", "-g64-r64-s4-gflush-hadv-f16"];

/// Settings of caches without groups of a chosen size. Each is combined with every such format on
/// both sides. Formats that always have the Hadamard transform do without the last one.
const BY_TOKEN: [&str; 3] = ["", "-s4-f16", "-s4-hadv-hadk-f16"];

/// Bits of a side, in descending order.
const BITS: [KvFormat; 4] =
    [KvFormat::Float, KvFormat::Affine8, KvFormat::Affine4, KvFormat::Affine2];

/// A cache shared by all layers, measured on the text of the search.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Alike {
    /// Its short name.
    pub cache: String,
    /// Bytes of the caches of all layers.
    pub bytes: usize,
    /// Its score.
    pub seen: Score,
}

/// Lists the caches of `capacity` tokens to measure within a budget of `most` bytes: every setting
/// with every format on both sides, and with every pair of bits. A pair is left out if another one
/// with as many or more bits on each side fits, or if the heads of the model do not allow it.
pub(super) fn alike(
    spec: &ModelSpec,
    capacity: usize,
    most: usize,
) -> Result<Vec<ModelCacheConfig>> {
    let fits = |cache: &ModelCacheConfig| -> Result<bool> {
        Ok(cache.validate(spec).is_ok() && bytes(spec, cache)?.0 <= most)
    };
    let named = |formats: [KvFormat; 2], settings: &str| -> Result<ModelCacheConfig> {
        let cache: KvCacheConfig = format!("k{}v{}{settings}", formats[0], formats[1]).parse()?;
        Ok(cache.with_capacity(capacity).into())
    };
    let mut found = vec![];
    for settings in GROUPED {
        let mut fitting: Vec<([usize; 2], ModelCacheConfig)> = vec![];
        for keys in 0..BITS.len() {
            for values in 0..BITS.len() {
                let formats = [keys, values].map(|at| BITS[at]);
                let cache = named(formats, settings)?;
                if formats.iter().any(|format| format.is_quantized()) && fits(&cache)? {
                    fitting.push(([keys, values], cache));
                }
            }
        }
        let beaten = |[keys, values]: [usize; 2]| {
            let better = |other: [usize; 2]| other[0] <= keys && other[1] <= values;
            fitting.iter().any(|&(other, _)| other != [keys, values] && better(other))
        };
        found.extend(
            fitting.iter().filter(|(pair, _)| !beaten(*pair)).map(|(_, cache)| cache.clone()),
        );
    }
    for format in KvFormat::ALL.iter().copied().filter(|it| it.is_quantized() && !it.is_grouped()) {
        let n = if format.needs_hadamard() { BY_TOKEN.len() - 1 } else { BY_TOKEN.len() };
        for settings in &BY_TOKEN[..n] {
            let cache = named([format; 2], settings)?;
            if fits(&cache)? {
                found.push(cache);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failing test may panic")]
mod tests {
    use kv_models::LayerSpec;

    use super::*;

    fn names(head_dim: usize, most: usize) -> Vec<String> {
        let layers = vec![LayerSpec::new(2, 1, head_dim); 2];
        let spec = ModelSpec::new(100, 2 * head_dim, 8192, layers);
        alike(&spec, 4096, most).unwrap().iter().map(ToString::to_string).collect()
    }

    /// The model has two layers of 4096 tokens with one head of 64 channels. Codes and parameters
    /// of a side in groups of 64 take 2 * 4096 * (64 * bits / 8 + 4) bytes: 294912 for 4 bits and
    /// 163840 for 2 bits. One side of 4 bits fits into half a megabyte, two do not, and a pair of 2
    /// bits is left out.
    #[test]
    fn pairs_of_fewer_bits_are_left_out() {
        let names = names(64, 525_000);
        let of = |settings: &str| -> Vec<&str> {
            let pairs = names.iter().filter_map(|name| name.strip_suffix(settings));
            pairs.filter(|pair| pair.len() == 4).collect()
        };
        assert_eq!(of("-g64-r64-s4-gflush-hadv-f16"), ["k4v2", "k2v4"]);
        // Groups of 32 have twice the parameters: a side of 4 bits takes 327680 bytes, one of 2
        // bits 196608. With the floats of 32 tokens, they exceed the budget.
        assert_eq!(of("-r32-s4-gflush-hadv-f16"), ["k2v2"]);
    }

    #[test]
    fn whatever_fits_is_there() {
        let all = names(64, usize::MAX);
        for name in [
            "k16v8",
            "k8v16",
            "k8v16-g64-r64-s4-gflush-hadv-f16",
            "kint8vint8",
            "ke4m3ve4m3-s4-f16",
        ] {
            assert!(all.iter().any(|it| it == name), "{all:?} lacks {name}");
        }
        let by_token = KvFormat::ALL.iter().filter(|it| it.is_quantized() && !it.is_grouped());
        let settings = by_token.map(|it| BY_TOKEN.len() - usize::from(it.needs_hadamard()));
        assert_eq!(all.len(), GROUPED.len() * 2 + settings.sum::<usize>());
        let unique: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(unique.len(), all.len(), "{all:?}");
        assert_eq!(names(64, 1000), [""; 0]);
        // Neither groups of 64 nor Hadamard matrices fit values of 96 channels.
        let narrow = names(96, usize::MAX);
        assert!(narrow.iter().any(|it| it == "k16v8"));
        let hadamard = narrow.iter().filter(|it| it.contains("hadv")).collect::<Vec<_>>();
        assert!(hadamard.iter().all(|it| it.starts_with("k8v16-")), "{hadamard:?}");
    }
}
