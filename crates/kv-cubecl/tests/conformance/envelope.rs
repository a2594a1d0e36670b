//! The error of a quantized cache against attention over the original values: neither zero nor
//! larger than measured.

use kv_cubecl::{On, Side, Target, reference, streaming_attention};

use crate::common::{Host, Setup, attend, stamp};

stamp!(error_within_its_envelope, keys_and_values_are_each_quantized);

/// Attention over the original keys and values in f64.
fn original(text: &Setup) -> Vec<f64> {
    let (query, key, value) = (text.query.f64(), text.key.f64(), text.value.f64());
    reference::causal_attention((&query, text.query.shape), (&key, text.key.shape), &value)
}

/// Largest difference over the largest magnitude.
fn distance(got: &[f32], want: &[f64]) -> f64 {
    let largest = want.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    let error = got.iter().zip(want).map(|(&got, want)| (f64::from(got) - want).abs());
    error.fold(0.0, f64::max) / largest
}

fn text(name: &str) -> Setup {
    Setup::new(name, [2, 6, 2, 200, 64], 60)
}

/// Largest error over the largest magnitude for `text(name)`, measured with the oracle in f64. Half
/// as much to one and a half times as much is allowed.
const MEASURED: [(&str, f64); 7] = [
    ("k2v2-g32-r64", 0.159),
    ("k2v2-g32-r64-after", 0.158),
    ("k2v2-g32-r64-s4", 0.154),
    ("k4v4-g32-r64", 0.0342),
    ("k8v8-g32-r64", 0.00349),
    ("k4v16-g32-r64", 0.0347),
    ("k16v4-g32-r64", 0.0188),
];

fn error_within_its_envelope<T: Target>(on: &On<T>) {
    for (name, measured) in MEASURED {
        let text = text(name);
        let want = original(&text);
        let streamed = attend(&mut text.cache(on), &text, &[100, 1, 1, 98], on);
        let [q, k, v] = text.on(on);
        let parallel = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
        for (how, got) in [("streamed", streamed), ("parallel", parallel)] {
            let error = distance(&got.data, &want);
            assert!(
                error < 1.5 * measured && error > 0.5 * measured,
                "{name} {how}: error {error:.3e}, measured {measured:.3e}"
            );
        }
    }
}

/// The table agrees with the oracle, so that a change of the oracle or of the inputs is noticed.
#[test]
fn envelope_is_the_oracles() {
    let mut wrong = Vec::new();
    for (name, measured) in MEASURED {
        let text = text(name);
        let got: Vec<f32> = text.reference().output.iter().map(|&x| x as f32).collect();
        let error = distance(&got, &original(&text));
        // The table has three digits.
        if (error - measured).abs() > 0.005 * measured {
            wrong.push(format!("{name}: {error:.3e}, the table says {measured:.3e}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The other cases compare implementations with each other, so a cache that quantizes nothing could
/// pass them.
fn keys_and_values_are_each_quantized<T: Target>(on: &On<T>) {
    let text = Setup::new("k2v2-g32-r32", [1, 2, 1, 65, 64], 61);
    let mut cache = text.cache(on);
    attend(&mut cache, &text, &[64], on);
    let error = |packed: Option<kv_cubecl::Packed>, host: &Host| {
        let restored = Host::of(packed.expect("something is quantized").dequantize());
        distance(&restored.data, &host.tokens(0..restored.shape[2]).f64())
    };
    let errors = (
        error(cache.packed(Side::Keys), &text.key),
        error(cache.packed(Side::Values), &text.value),
    );
    // Two bits: half a step is a sixth of a group's range.
    assert!(errors.0 > 0.01 && errors.0 < 0.3, "keys are off by {}", errors.0);
    assert!(errors.1 > 0.01 && errors.1 < 0.3, "values are off by {}", errors.1);

    // Quantizing only one of the two sides changes the output as well.
    for name in ["k2v16-g32-r32", "k16v2-g32-r32"] {
        let text = Setup { config: name.parse().unwrap(), ..text.clone() };
        let text = Setup { config: text.config.with_capacity(65), ..text };
        let want = original(&text);
        let output = attend(&mut text.cache(on), &text, &[64, 1], on);
        let exact = output.tokens(0..31);
        let floats: Vec<f64> = want.chunks(65 * 64).flat_map(|x| &x[..31 * 64]).copied().collect();
        assert!(distance(&exact.data, &floats) < 1e-5, "{name}: an error before any flush");
        let last: Vec<f64> = want.chunks(65 * 64).flat_map(|x| &x[64 * 64..]).copied().collect();
        let error = distance(&output.tokens(64..65).data, &last);
        assert!(error > 1e-3, "{name}: no error after a flush ({error:.1e})");
    }
}
