//! Bytes of DeepSeek-V4's caches, against the published numbers.

use kv_cubecl::{
    CacheFloat, KvFormat, On, Target,
    sparse::{
        Compression, IndexConfig, RowFormat, SparseBytes, SparseCache, SparseConfig, SparseTensor,
    },
};

use crate::common::stamp;

stamp!(
    layers_take_the_published_bytes_per_token,
    open_windows_take_the_published_bytes,
    models_take_the_published_bytes,
    entries_take_a_byte_less_than_published,
    models_in_eight_bits_take_the_published_bytes,
    allocated_bytes_equal_the_plan,
);

const GIB: f64 = (1u64 << 30) as f64;
const MILLION: usize = 1_000_000;
const TWO_TO_20: usize = 1 << 20;

/// No tensor is empty: a store without codes has four words, and one with codes only has a float.
const NO_CODES: usize = 16;
const NO_FLOATS: usize = 4;

/// The kinds of layers: with an indexer (CSA), without one (HCA), and with a window only (SWA).
#[derive(Clone, Copy)]
enum Kind {
    Csa,
    Hca,
    Swa,
}

/// The formats of all layers of a model.
#[derive(Clone, Copy)]
struct Formats {
    float: CacheFloat,
    entries: RowFormat,
    keys: RowFormat,
}

impl Formats {
    const fn float(float: CacheFloat) -> Self {
        Self { float, entries: RowFormat::float(float), keys: RowFormat::float(float) }
    }
}

const BF16: Formats = Formats::float(CacheFloat::Bf16);
const F32: Formats = Formats::float(CacheFloat::F32);
/// Entries in 8 bits with 64 channels in bf16, and keys in 8 bits.
const FP8: Formats = Formats {
    float: CacheFloat::Bf16,
    entries: RowFormat::codes(KvFormat::E4m3Blocks64).with_float_channels(64, CacheFloat::Bf16),
    keys: RowFormat::codes(KvFormat::E4m3Blocks),
};
/// Entries as in [`FP8`], and keys in 4 bits.
const FP8_FP4: Formats = Formats { keys: RowFormat::codes(KvFormat::E2m1Blocks), ..FP8 };

/// The layers of a model.
struct Model {
    csa: usize,
    hca: usize,
    swa: usize,
    top_k: usize,
}

const FLASH: Model = Model { csa: 21, hca: 20, swa: 2, top_k: 512 };
const PRO: Model = Model { csa: 30, hca: 31, swa: 0, top_k: 1024 };

impl Model {
    fn config(&self, kind: Kind, formats: Formats, tokens: usize) -> SparseConfig {
        let Formats { float, entries, keys } = formats;
        let layer = SparseConfig::new(512, 128).with_capacity(tokens).with_formats(float, entries);
        let index = IndexConfig { head_dim: 128, top_k: self.top_k, keys };
        match kind {
            Kind::Csa => layer.with_compression(Compression::overlapping(4)).with_index(index),
            Kind::Hca => layer.with_compression(Compression::new(128)),
            Kind::Swa => layer,
        }
    }

    fn layer(&self, kind: Kind, formats: Formats, tokens: usize) -> SparseBytes {
        self.config(kind, formats, tokens).memory_bytes(1).unwrap()
    }

    /// Returns the bytes of all layers without the projections of open windows.
    fn bytes(&self, formats: Formats, tokens: usize) -> usize {
        let kinds = [(Kind::Csa, self.csa), (Kind::Hca, self.hca), (Kind::Swa, self.swa)];
        let of = |(kind, layers)| {
            let bytes = self.layer(kind, formats, tokens);
            layers * (bytes.total() - bytes.open)
        };
        kinds.map(of).iter().sum()
    }
}

/// Checks bytes against a number that was published with two decimals.
#[track_caller]
fn published(bytes: usize, unit: f64, value: f64) {
    let got = bytes as f64 / unit;
    assert!((got - value).abs() <= 0.005, "{got} instead of {value}");
}

fn layers_take_the_published_bytes_per_token<T: Target>(_: &On<T>) {
    for model in [FLASH, PRO] {
        for tokens in [128, 128 * 1000, TWO_TO_20] {
            let layer = |kind| model.layer(kind, BF16, tokens);
            let (csa, hca, swa) = (layer(Kind::Csa), layer(Kind::Hca), layer(Kind::Swa));
            assert_eq!(csa.entries, 256 * tokens + NO_CODES);
            assert_eq!(csa.keys, 64 * tokens + NO_CODES);
            assert_eq!((hca.entries, hca.keys), (8 * tokens + NO_CODES, 0));
            assert_eq!((swa.entries, swa.keys, swa.open), (0, 0, 0));
            let window = (128 << 10) + NO_CODES;
            assert_eq!([csa.window, hca.window, swa.window], [window; 3]);
        }
    }
    let per_token = 30 * (256 + 64) + 31 * 8;
    let grown = PRO.bytes(BF16, 2 * TWO_TO_20) - PRO.bytes(BF16, TWO_TO_20);
    assert_eq!(grown, per_token * TWO_TO_20);
}

/// Projections and gates of entries and of keys are in f32 with every format.
fn open_windows_take_the_published_bytes<T: Target>(_: &On<T>) {
    for formats in [BF16, F32, FP8, FP8_FP4] {
        let open = |kind| PRO.layer(kind, formats, TWO_TO_20).open;
        assert_eq!(open(Kind::Csa), (64 << 10) + (16 << 10) + 4 * NO_CODES);
        assert_eq!(open(Kind::Hca), (512 << 10) + 2 * NO_CODES);
    }
}

fn models_take_the_published_bytes<T: Target>(_: &On<T>) {
    published(PRO.bytes(BF16, MILLION), 1e9, 9.86);
    published(PRO.bytes(BF16, TWO_TO_20), GIB, 9.62);
    published(FLASH.bytes(BF16, TWO_TO_20), GIB, 6.72);
    let stores = 3 * PRO.csa + 2 * PRO.hca;
    let f32 = PRO.bytes(F32, TWO_TO_20) + stores * NO_CODES;
    assert_eq!(f32, 2 * PRO.bytes(BF16, TWO_TO_20));
}

/// The published entry in 8 bits takes 584 bytes: 448 codes, 64 channels in bf16, 7 scales for
/// blocks of 64 channels, and a byte of padding. Scales of all entries are adjacent here, so an
/// entry has no padding. Keys take the published bytes: 128 codes and 4 scales, or 64 and 4.
fn entries_take_a_byte_less_than_published<T: Target>(_: &On<T>) {
    let own = 448 + 64 * 2 + 7;
    for (keys, formats) in [(132, FP8), (68, FP8_FP4)] {
        for model in [FLASH, PRO] {
            let csa = model.layer(Kind::Csa, formats, TWO_TO_20);
            assert_eq!(csa.entries, own * TWO_TO_20 / 4);
            assert_eq!(csa.keys, keys * TWO_TO_20 / 4 + NO_FLOATS);
            assert_eq!(model.layer(Kind::Hca, formats, TWO_TO_20).entries, own * TWO_TO_20 / 128);
        }
        let entries = 30 * TWO_TO_20 / 4 + 31 * TWO_TO_20 / 128;
        let windows = 61 * (128 * 1024 + NO_CODES);
        let keys = 30 * (keys * TWO_TO_20 / 4 + NO_FLOATS);
        assert_eq!(PRO.bytes(formats, TWO_TO_20), windows + keys + own * entries);
    }
}

/// With the byte of padding, models take the published bytes; without it, 0.0076 GiB less.
fn models_in_eight_bits_take_the_published_bytes<T: Target>(_: &On<T>) {
    let padding = 30 * TWO_TO_20 / 4 + 31 * TWO_TO_20 / 128;
    for (formats, with, without) in [(FP8, 5.39, 5.38), (FP8_FP4, 4.92, 4.91)] {
        let bytes = PRO.bytes(formats, TWO_TO_20);
        published(bytes + padding, GIB, with);
        published(bytes, GIB, without);
    }
}

/// The layers of Flash at 65536 tokens, in each of the formats.
fn allocated_bytes_equal_the_plan<T: Target>(on: &On<T>) {
    for formats in [F32, BF16, FP8, FP8_FP4] {
        if !on.supports_dtype(formats.float.dtype()) {
            continue;
        }
        for (kind, stores) in [(Kind::Csa, 7), (Kind::Hca, 4), (Kind::Swa, 1)] {
            let config = FLASH.config(kind, formats, 1 << 16);
            let (plan, cache) = (config.memory_bytes(1).unwrap(), SparseCache::new(&config, 1, on));
            let cache = cache.unwrap();
            assert_eq!(cache.memory_bytes(), plan);
            let (mut bytes, mut codes, mut floats) = (0, 0, 0);
            for part in cache.parts() {
                match part.tensor {
                    SparseTensor::Codes(words) => {
                        (codes, bytes) = (codes + 1, bytes + 4 * words.shape().num_elements());
                    }
                    SparseTensor::Floats(rows) => {
                        bytes += rows.shape().num_elements() * rows.dtype().size();
                        floats += 1;
                    }
                }
            }
            // Parts list no placeholder.
            let placeholders = (stores - codes) * NO_CODES + (stores - floats) * NO_FLOATS;
            assert_eq!(bytes + placeholders, plan.total());
        }
    }
}
