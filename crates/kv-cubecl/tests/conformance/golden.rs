//! Compares with files of numbers from an independent implementation, in `tests/golden`;
//! `KV_GOLDEN=DIR` reads another folder of the same form.

use std::{collections::HashMap, fs, path::PathBuf};

use kv_cubecl::{
    CacheFloat, Flush, Granularity, KvCacheConfig, KvFormat, Logical, On, QuantizedCounts, Target,
    quantize, reference, streaming_attention,
};
use safetensors::SafeTensors;

use crate::common::{
    CLOSE, Host, Rng, Setup, attend, chunk_sizes, close, equal_bits, sampled, skipped, snapshot,
    stamp,
};

stamp!(quantizer_files, stream_files, stream_files_in_parallel, stream_files_in_chunks);

/// One file of numbers (safetensors), read whole.
struct File {
    name: String,
    bytes: Vec<u8>,
    metadata: HashMap<String, String>,
}

/// The files of the index whose names start with `prefix`.
fn files(prefix: &str) -> Vec<File> {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    let folder = PathBuf::from(std::env::var_os("KV_GOLDEN").unwrap_or(default.into()));
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let names: Vec<String> = serde_json::from_slice(&read("index.json")).unwrap();
    let files: Vec<_> = names
        .into_iter()
        .filter(|name| name.starts_with(prefix))
        .map(|name| {
            let bytes = read(&name);
            let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
            let metadata = header.metadata().clone().unwrap_or_default();
            File { name, bytes, metadata }
        })
        .collect();
    assert!(!files.is_empty(), "no {prefix} files in {}", folder.display());
    files
}

impl File {
    fn words<const N: usize>(&self, tensor: &str) -> Vec<[u8; N]> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = tensors.tensor(tensor);
        let view = view.unwrap_or_else(|error| panic!("{}: {tensor}: {error}", self.name));
        assert_eq!(view.dtype().bitsize(), 8 * N, "{}: {tensor}: type", self.name);
        view.data().as_chunks::<N>().0.to_vec()
    }

    fn u32s(&self, tensor: &str) -> Vec<u32> {
        self.words(tensor).into_iter().map(u32::from_le_bytes).collect()
    }

    fn f16s(&self, tensor: &str) -> Vec<half::f16> {
        self.words(tensor).into_iter().map(half::f16::from_le_bytes).collect()
    }

    fn host(&self, tensor: &str) -> Host {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let shape = tensors.tensor(tensor).unwrap().shape().try_into().unwrap();
        Host { data: self.words(tensor).into_iter().map(f32::from_le_bytes).collect(), shape }
    }

    fn number(&self, field: &str) -> usize {
        let value = self.metadata.get(field);
        value.and_then(|value| value.parse().ok()).unwrap_or_else(|| {
            panic!("{}: metadata {field} is {value:?}", self.name);
        })
    }

    /// The configuration and inputs of a stream file.
    fn text(&self) -> Setup {
        let bits = |field| KvFormat::named(&self.metadata[field]).unwrap();
        let key = self.host("key");
        let config = KvCacheConfig::new(bits("k_bits"), bits("v_bits"))
            .with_group_size(self.number("group_size"))
            .with_residual_length(self.number("residual_length"))
            .with_sink_tokens(self.number("sink_tokens"))
            .with_capacity(key.shape[2])
            .with_float(match self.metadata.get("float") {
                None => CacheFloat::F32,
                Some(name) => *CacheFloat::ALL.iter().find(|float| float.name() == name).unwrap(),
            })
            .with_hadamard_values(
                self.metadata.get("hadamard").is_some_and(|side| side == "values"),
            )
            .with_flush(Flush::new(
                match self.metadata["flush"].as_str() {
                    "before" => false,
                    "after" => true,
                    other => panic!("{}: flush {other}", self.name),
                },
                self.metadata.get("sliding").is_some_and(|sliding| sliding == "true"),
            ));
        Setup { config, seed: 0, query: self.host("query"), key, value: self.host("value") }
    }

    fn counts(&self) -> Vec<QuantizedCounts> {
        let counts = self.u32s("quantized_counts");
        let pairs = counts.as_chunks::<2>().0.iter();
        pairs.map(|&[k, v]| QuantizedCounts { keys: k as usize, values: v as usize }).collect()
    }
}

const SIDES: [(&str, Granularity); 2] =
    [("key", Granularity::PerChannel), ("value", Granularity::PerToken)];

fn quantizer_files<T: Target>(on: &On<T>) {
    for file in files("quant_") {
        let bits = KvFormat::named(&file.metadata["n_bits"]).unwrap();
        for (side, granularity) in SIDES {
            let input = file.host(side).on(on);
            let packed = quantize(input, granularity, bits, file.number("group_size")).unwrap();
            let Logical { codes, scale, min, .. } = packed.to_logical();
            let name = format!("{} {side}", file.name);
            assert!(codes == file.u32s(&format!("{side}_codes")), "{name}: codes");
            assert!(scale == file.f16s(&format!("{side}_scale")), "{name}: scale");
            assert!(min == file.f16s(&format!("{side}_min")), "{name}: min");
            let restored = Host::of(packed.dequantize());
            equal_bits(name, &restored.data, &file.host(&format!("{side}_dequant")).data);
        }
    }
}

/// The streams of caches whose float type the device has.
fn streams<T: Target>(on: &On<T>) -> Vec<File> {
    let mut files = sampled::<T, _>(files("stream_"));
    files.retain(|file| {
        let float = file.text().config.float;
        let has = on.supports_dtype(float.dtype());
        if !has {
            skipped(&format!("{}: the device has no {}", file.name, float.name()));
        }
        has
    });
    files
}

/// One token at a time; before each, what `peek` says must be what `attend` then says.
fn stream_files<T: Target>(on: &On<T>) {
    for file in streams(on) {
        let (text, expected, counts) = (file.text(), file.host("output"), file.counts());
        let mut cache = text.cache(on);
        let mut outputs = Vec::new();
        for (t, &counts) in counts.iter().enumerate() {
            outputs.push(attend(&mut cache, &text.tokens(t..t + 1), &[1], on));
            assert_eq!(cache.quantized_counts(), counts, "{}: counts at {t}", file.name);
            let ahead = (t + 1 + t % 5).min(text.len() - 1);
            if t % 7 == 0 && ahead > t {
                let before = snapshot(&cache);
                let [q, k, v] = text.tokens(t + 1..ahead + 1).on(on);
                let peeked = Host::of(cache.peek(q, k, v).unwrap().output);
                let expected = expected.tokens(t + 1..ahead + 1).f64();
                close(format!("{}: peek after {t}", file.name), &peeked, &expected, CLOSE);
                assert!(snapshot(&cache) == before, "{}: peek wrote after {t}", file.name);
            }
        }
        close(&file.name, &Host::cat(&outputs), &expected.f64(), CLOSE);
    }
}

fn stream_files_in_parallel<T: Target>(on: &On<T>) {
    for file in streams(on) {
        let text = file.text();
        let [q, k, v] = text.on(on);
        let output = streaming_attention(q, k, v, &text.config).unwrap().output;
        close(&file.name, &Host::of(output), &file.host("output").f64(), CLOSE);
    }
}

fn stream_files_in_chunks<T: Target>(on: &On<T>) {
    for (seed, file) in streams(on).into_iter().enumerate() {
        let (text, counts) = (file.text(), file.counts());
        let mut rng = Rng::new(seed as u64);
        for largest in [5, 40, text.len()] {
            let sizes = chunk_sizes(&mut rng, text.len(), largest);
            let mut cache = text.cache(on);
            let output = attend(&mut cache, &text, &sizes, on);
            let name = format!("{} in chunks {sizes:?}", file.name);
            close(&name, &output, &file.host("output").f64(), CLOSE);
            assert_eq!(cache.quantized_counts(), *counts.last().unwrap(), "{name}: counts");
        }
    }
}

/// The oracle, too, agrees with the files.
#[test]
fn oracle_quantizer() {
    for file in files("quant_") {
        let (n_bits, group_size) = (file.number("n_bits") as u32, file.number("group_size"));
        for (side, granularity) in SIDES {
            let Host { data, shape } = file.host(side);
            let packed = reference::quantize(&data, shape, granularity, n_bits, group_size);
            let name = format!("{} {side}", file.name);
            assert!(packed.codes == file.u32s(&format!("{side}_codes")), "{name}: codes");
            assert!(packed.scale == file.f16s(&format!("{side}_scale")), "{name}: scale");
            assert!(packed.min == file.f16s(&format!("{side}_min")), "{name}: min");
            let restored = reference::dequantize(&packed, shape, granularity, n_bits, group_size);
            equal_bits(name, &restored, &file.host(&format!("{side}_dequant")).data);
        }
    }
}

/// The files hold f64 attention rounded to f32, so they agree to f32's precision.
#[test]
fn oracle_stream() {
    for file in files("stream_") {
        let run = file.text().reference();
        assert_eq!(run.counts, file.counts(), "{}: counts", file.name);
        close(&file.name, &file.host("output"), &run.output, 2e-7);
    }
}
