//! The formats of a side: what they make of numbers, bit for bit.

use std::collections::HashSet;

use crate::common::{File, Host, Rng, equal_bits, stamp};
use burn::tensor::{DType, Int, Tensor, TensorData};
use kv_cubecl::{
    CacheParts, CacheShape, FrameCache, FrameConfig, Frames, Granularity, KvCache, KvCacheConfig,
    KvFormat, Logical, On, Packed, RunningScale, Side, SteGradient, Target, fake_quantize_side,
    layout::CacheLayout,
    quantize_side,
    reference::{self, Numbers},
};

mod odd_numbers;

stamp!(format_files, frame_files, every_code_restores, every_number_is_cast, random_sides);

/// The folder of the golden files.
const FOLDER: &str = "formats";

/// Formats and what the files call them. With `int8_channel` all tokens of a channel are one group.
const FILES: &[(KvFormat, &str)] = &[
    (KvFormat::Int8, "int8_token"),
    (KvFormat::Int8Groups, "int8_channel"),
    (KvFormat::E4m3, "e4m3_token"),
    (KvFormat::E5m2, "e5m2_token"),
    (KvFormat::E4m3Blocks, "e4m3_ue8m0_b32"),
    (KvFormat::E4m3Blocks64, "e4m3_ue8m0_b64"),
    (KvFormat::E2m1Blocks, "e2m1_ue8m0_b32"),
    (KvFormat::Mxfp4, "mxfp4"),
];

/// Reads all files with inputs and expected results.
fn files() -> Vec<File> {
    let names: Vec<String> =
        serde_json::from_slice(&File::read(FOLDER, "formats_index.json").bytes).unwrap();
    let files = names.iter().map(|name| File::read(FOLDER, name));
    let files: Vec<_> = files.filter(|file| file.has("input")).collect();
    assert!(!files.is_empty());
    files
}

/// Returns the formats whose results the file has.
fn formats_of(file: &File) -> impl Iterator<Item = (KvFormat, &'static str)> {
    FILES.iter().copied().filter(|(_, name)| file.has(&format!("{name}_codes")))
}

/// A cache with groups of this size.
fn grouped(format: KvFormat, group: usize) -> KvCacheConfig {
    KvCacheConfig::new(format, format).with_group_size(group)
}

/// Returns whether codes of a format stand for multiples of a scale.
fn has_no_offset(format: KvFormat) -> bool {
    reference::numbers(format).is_some()
}

/// The sides on which the files have a format: a group of tokens of a channel is one of keys.
fn sides(format: KvFormat) -> &'static [Side] {
    if format.is_grouped() { &[Side::Keys] } else { &Side::BOTH }
}

/// Codes of 8 bits of a logical tensor of groups of tokens, in the order of its elements.
fn codes_of_channels(logical: &Logical, [batch, heads, tokens, head_dim]: [usize; 4]) -> Vec<u8> {
    let elements =
        (0..batch * heads * tokens).flat_map(|row| (0..head_dim).map(move |at| (row, at)));
    let word = |row: usize, channel| logical.codes[row / 4 * head_dim + channel];
    elements.map(|(row, channel)| (word(row, channel) >> (row % 4 * 8)) as u8).collect()
}

/// Codes of a logical tensor, one by one.
fn codes(logical: &Logical, format: KvFormat) -> Vec<u8> {
    let per_word = 32 / format.n_bits();
    let mask = (1u32 << format.n_bits()) - 1;
    let of_word = |word: &u32| {
        let word = *word;
        (0..per_word).map(move |i| (word >> (i * format.n_bits()) & mask) as u8)
    };
    logical.codes.iter().flat_map(of_word).collect()
}

/// Parameters of a logical tensor.
fn parameters(logical: &Logical) -> Vec<u16> {
    let halves = logical.scale.iter().map(|scale| scale.to_bits());
    halves.chain(logical.exponents.iter().map(|&byte| u16::from(byte))).collect()
}

/// Asserts that all are equal, or says which is not.
#[track_caller]
fn same<N: PartialEq + core::fmt::LowerHex>(what: &str, got: &[N], expected: &[N]) {
    assert_eq!(got.len(), expected.len(), "{what}: how many");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(got == expected, "{what}: number {i} is {got:#x}, not {expected:#x}");
    }
}

fn format_files<T: Target>(on: &On<T>) {
    for file in files() {
        let input = file.input();
        for (format, name) in formats_of(&file) {
            for &side in sides(format) {
                let group = input.shape[2];
                let packed = quantize_side(input.on(on), side, &grouped(format, group)).unwrap();
                let logical = packed.to_logical();
                let what = format!("{} {name} {side}", file.name);
                let expected = file.parameters(&format!("{name}_scale"));
                same(&format!("{what}: scales"), &parameters(&logical), &expected);
                let expected = file.codes(&format!("{name}_codes"));
                let got = match format.granularity(side) {
                    Some(Granularity::PerChannel) => codes_of_channels(&logical, input.shape),
                    _ => codes(&logical, format),
                };
                same(&format!("{what}: codes"), &got, &expected);
                let expected = file.f32s(&format!("{name}_dequant"));
                equal_bits(&what, &Host::of(packed.dequantize()).data, &expected);
                let gradient = SteGradient::Identity;
                let fake =
                    fake_quantize_side(input.on(on), side, &grouped(format, group), gradient)
                        .unwrap();
                equal_bits(format!("{what}: fake"), &Host::of(fake).data, &expected);
            }
        }
    }
}

/// The files have all tokens of a head as one frame.
fn frame_files<T: Target>(on: &On<T>) {
    for file in files().iter().filter(|file| file.has("int8_head_codes")) {
        let input = file.input();
        let [batch, heads, tokens, head_dim] = input.shape;
        let mut running = RunningScale::default();
        running.floor = 1e-30;
        let format = KvCacheConfig::new(KvFormat::Int8Frames, KvFormat::Int8Frames);
        let config = FrameConfig::new(format, tokens, Frames(2)).with_running(running);
        let shape = CacheShape::new(batch, heads, head_dim);
        let mut cache = FrameCache::new(&config, shape, on).unwrap();
        cache.append(input.on(on), input.on(on)).unwrap();
        for side in Side::BOTH {
            let what = format!("{} int8_head {side}", file.name);
            let packed = cache.newest(side).unwrap();
            let logical = packed.to_logical();
            // Every token has the scale of its head.
            let scales = file.parameters("int8_head_scale");
            let scales = scales.iter().flat_map(|&scale| core::iter::repeat_n(scale, tokens));
            same(&what, &parameters(&logical), &scales.collect::<Vec<_>>());
            same(&what, &codes(&logical, KvFormat::Int8), &file.codes("int8_head_codes"));
            let restored = Host::of(packed.dequantize());
            equal_bits(&what, &restored.data, &file.f32s("int8_head_dequant"));
        }
    }
}

/// The oracle, too, agrees with the files.
#[test]
fn oracle_of_formats() {
    let mut checked = HashSet::new();
    for file in files() {
        let Host { data, shape } = file.input();
        for (format, name) in formats_of(&file) {
            checked.insert(name);
            let what = format!("{} {name}", file.name);
            let got = reference::quantize_side(
                &data,
                shape,
                sides(format)[0],
                &grouped(format, shape[2]),
            );
            let scales = file.parameters(&format!("{name}_scale"));
            same(&format!("{what}: scales"), &parameters(&got), &scales);
            let got = match format.is_grouped() {
                true => codes_of_channels(&got, shape),
                false => codes(&got, format),
            };
            same(&format!("{what}: codes"), &got, &file.codes(&format!("{name}_codes")));
            let got = reference::fake_quantize_side(
                &data,
                shape,
                sides(format)[0],
                &grouped(format, shape[2]),
            );
            equal_bits(&what, &got, &file.f32s(&format!("{name}_dequant")));
        }
    }
    // Another folder may have files of fewer formats.
    if std::env::var_os("KV_GOLDEN").is_none() {
        assert_eq!(checked.len(), FILES.len(), "{checked:?}");
    }
}

/// The oracle agrees with the files on every code and on numbers cast to codes with a scale of 1.
/// All backends are compared with the oracle.
#[test]
fn oracle_of_codes() {
    let file = File::read(FOLDER, "formats_tables.safetensors");
    let input = file.f32s("cast_input");
    for (numbers, name) in
        [(Numbers::E4M3, "e4m3"), (Numbers::E5M2, "e5m2"), (Numbers::E2M1, "e2m1")]
    {
        let values = file.f32s(&format!("{name}_values"));
        assert_eq!(values.len(), if name == "e2m1" { 16 } else { 256 });
        for (code, expected) in values.into_iter().enumerate() {
            let got = numbers.value(code as u8) as f32;
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{name}: code {code} is {got}, not {expected}");
        }
        let codes: Vec<u8> = input.iter().map(|&x| numbers.code(f64::from(x))).collect();
        same(name, &codes, &file.codes(&format!("cast_{name}")));
    }
}

/// Numbers cast to codes, with a scale of 1, which the largest number beside them gives; those
/// beyond it are cast in blocks, whose scale may be too small for them.
fn every_number_is_cast<T: Target>(on: &On<T>) {
    let file = File::read(FOLDER, "formats_tables.safetensors");
    let input = file.f32s("cast_input");
    for (format, name) in [
        (KvFormat::E4m3, "e4m3"),
        (KvFormat::E5m2, "e5m2"),
        (KvFormat::E4m3Blocks, "e4m3"),
        (KvFormat::E4m3Blocks64, "e4m3"),
        (KvFormat::E2m1Blocks, "e2m1"),
        (KvFormat::Mxfp4, "e2m1"),
    ] {
        let largest = reference::numbers(format).unwrap().largest() as f32;
        let cast = file.codes(&format!("cast_{name}"));
        let (mut data, mut expected) = (vec![], vec![]);
        // Of MXFP4's scale, numbers from 4 to 8 have the same exponent, and those from 6 on
        // saturate.
        let most = if format == KvFormat::Mxfp4 { 7.99 } else { largest };
        // All channels of a row are one block.
        let width = reference::row_group(format, true, 32, 32).unwrap();
        for (x, code) in input.iter().zip(cast).filter(|(x, _)| x.abs() <= most) {
            if data.len() % width == 0 {
                data.push(largest);
                expected.push(None);
            }
            data.push(*x);
            expected.push(Some(code));
        }
        let tokens = data.len().div_ceil(width);
        data.resize(tokens * width, largest);
        expected.resize(tokens * width, None);
        let host = Host { data, shape: [1, 1, tokens, width] };
        let packed = quantize_side(host.on(on), Side::Values, &grouped(format, 32)).unwrap();
        let got = codes(&packed.to_logical(), format);
        let checked = expected.iter().flatten().count();
        assert!(checked > 500, "{format}: {checked}");
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            let right = expected.is_none_or(|expected| *got == expected);
            assert!(right, "{format}: {} is {got:#x}, not {expected:x?}", host.data[i]);
        }
    }
}

/// A cache whose keys are these words, restored.
fn restored<T: Target>(
    on: &On<T>,
    name: &str,
    n_bits: u32,
    head_dim: usize,
    words: Vec<u32>,
) -> Vec<f32> {
    let config: KvCacheConfig = name.parse().unwrap();
    let shape = CacheShape::new(1, 1, head_dim);
    let tokens = words.len() * (32 / n_bits as usize) / head_dim;
    let config = config.with_capacity(tokens);
    let layout = CacheLayout::new(&config, shape).unwrap();
    let sides = layout.sides();
    let tensor = |words: Vec<u32>| {
        let n = words.len();
        Tensor::<1, Int>::from_data(TensorData::new(words, [n]), (&**on, DType::U32))
    };
    let mut keys = vec![0; sides.keys.words(1)];
    keys[..words.len()].copy_from_slice(&words);
    let place = sides.keys.packed().unwrap();
    for token in 0..tokens {
        for group in 0..place.spec.groups(head_dim) {
            let (word, shift) = place.parameter(token, group);
            // A scale of 1, in f16 or as an exponent and 127.
            let one = if place.spec.format.parameter_bits() == 8 { 127 } else { 0x3c00 };
            keys[word] |= one << shift;
        }
    }
    let parts = CacheParts {
        keys: tensor(keys),
        values: tensor(vec![0; sides.values.words(1)]),
        floats: Tensor::zeros(layout.float_shape(), &**on),
        lens: vec![tokens],
    };
    let cache = KvCache::from_parts(&config, shape, parts).unwrap();
    Host::of(cache.packed(Side::Keys).unwrap().dequantize()).data
}

/// All codes of all formats, as they lie in memory.
fn every_code_restores<T: Target>(on: &On<T>) {
    // Where a group has a word for its parameter, codes are those of the format without.
    for format in KvFormat::ALL.iter().copied().filter(|format| !format.is_grouped()) {
        let Some(numbers) = reference::numbers(format) else { continue };
        let n_codes = 1usize << format.n_bits();
        let bytes: Vec<u8> = match format.n_bits() {
            4 => (0..128u32).map(|i| ((2 * i % 16) | (((2 * i + 1) % 16) << 4)) as u8).collect(),
            _ => (0..=255).collect(),
        };
        let words: Vec<u32> =
            bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let got = restored(on, &format!("k{format}v16"), format.n_bits(), 64, words);
        for (i, got) in got.iter().enumerate().take(n_codes) {
            let expected = numbers.value((i % n_codes) as u8) as f32;
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{format}: code {i} is {got}, not {expected}");
        }
    }
}

/// Quantizes a side with the oracle, as the words of a [`Logical`].
fn expected(host: &Host, side: Side, format: KvFormat, group: usize) -> Logical {
    reference::quantize_side(&host.data, host.shape, side, &grouped(format, group))
}

#[track_caller]
fn check_packed(what: &str, packed: &Packed, expected: &Logical) {
    let got = packed.to_logical();
    let wrong = got.codes.iter().zip(&expected.codes).position(|(got, expected)| got != expected);
    same(&format!("{what}: scales"), &parameters(&got), &parameters(expected));
    if let Some(word) = wrong {
        panic!("{what}: word {word} is {:#x}, not {:#x}", got.codes[word], expected.codes[word]);
    }
    assert_eq!(&got, expected, "{what}");
}

/// Returns whether a side of this shape has whole groups of 32, or whole blocks.
fn fits(format: KvFormat, side: Side, [_, _, tokens, head_dim]: [usize; 4]) -> bool {
    match format.granularity(side) {
        Some(Granularity::PerChannel) => tokens.is_multiple_of(32),
        _ => reference::row_group(format, true, head_dim, 32)
            .is_none_or(|group| head_dim.is_multiple_of(group)),
    }
}

fn random_sides<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(81);
    for format in KvFormat::ALL.iter().copied().filter(|&format| has_no_offset(format)) {
        // Odd numbers of tokens, whose parameters end within a word.
        for shape in [
            [2, 3, 33, 64],
            [1, 1, 1, 128],
            [1, 2, 7, 96],
            [1, 1, 50, 256],
            [1, 2, 3, 32],
            [2, 2, 64, 32],
        ] {
            for spread in [-4.0f32, 0.0, 3.0] {
                let spread = 10f32.powf(spread);
                let mut host = Host::normal(&mut rng, shape);
                host.data.iter_mut().for_each(|x| *x *= spread);
                // A channel that stands out, and zeros.
                host.data.iter_mut().step_by(shape[3]).for_each(|x| *x *= 30.0);
                host.data[..shape[3]].fill(0.0);
                for side in Side::BOTH.into_iter().filter(|&side| fits(format, side, shape)) {
                    let what = format!("{format} {side} {shape:?} spread {spread}");
                    let packed = quantize_side(host.on(on), side, &grouped(format, 32)).unwrap();
                    check_packed(&what, &packed, &expected(&host, side, format, 32));
                    let restored: Vec<f32> = reference::fake_quantize_side(
                        &host.data,
                        shape,
                        side,
                        &grouped(format, 32),
                    );
                    equal_bits(&what, &Host::of(packed.dequantize()).data, &restored);
                    let gradient = SteGradient::Identity;
                    let fake =
                        fake_quantize_side(host.on(on), side, &grouped(format, 32), gradient);
                    equal_bits(&what, &Host::of(fake.unwrap()).data, &restored);
                }
            }
        }
    }
}
