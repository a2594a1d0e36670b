//! Matrices: rejected inputs, storage, and use in modules.

use burn::{
    module::{Module, list_param_ids},
    tensor::{Bytes, DType, Device, Int, Tensor, TensorData},
};
use kv_weights::{
    Activations, Fused, PackedMatrix, WeightFormat, lookup, lookup_parts, project, project_fused,
    reference,
};

use crate::common::{Blocks, Rng, device_blocks, host, magnitudes, matrix, stamp};

stamp!(
    bad_input_is_rejected,
    matrices_beyond_a_buffer_are_split,
    blocks_of_a_file_are_not_copied,
    a_module_keeps_its_blocks,
    nan_reaches_all_products_of_its_row
);

#[track_caller]
fn says<T: core::fmt::Debug>(result: kv_weights::Result<T>, expected: &str) {
    assert_eq!(result.unwrap_err().to_string(), expected);
}

fn bad_input_is_rejected(device: &Device) {
    let bytes = |n| Bytes::from_bytes_vec(vec![0; n]);
    let new = |n, format, shape| PackedMatrix::from_bytes(bytes(n), format, shape, device);
    says(
        new(40, WeightFormat::Q4_1, [2, 33]),
        "columns 33: must be a positive multiple of 32, the numbers of a q4_1 block",
    );
    says(new(0, WeightFormat::Q8_0, [0, 32]), "rows 0: must be at least 1");
    says(
        new(143, WeightFormat::Q4K, [1, 256]),
        "bytes 143: must be 144 for 1 rows of 256 numbers in q4_k",
    );
    says(
        new(288, WeightFormat::Q4K, [1, 256]),
        "bytes 288: must be 144 for 1 rows of 256 numbers in q4_k",
    );
    says(
        new(18, WeightFormat::Q4_0, [usize::MAX / 4, 64]),
        "rows 4611686018427387903: must not need more bytes than can be addressed",
    );
    says(
        "q3_k".parse::<WeightFormat>(),
        "weight format \"q3_k\": must be one of q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, \
         mxfp4, int4-g32, int4-g64, int4-g128, int8-g32, int8-g64, int8-g128, f16, bf16",
    );

    let mut rng = Rng::new(600);
    let packed = device_blocks(&Blocks::random(&mut rng, WeightFormat::Q4_1, [3, 64]), device);
    says(
        project(matrix(&rng.normals(32), 32, device), &packed, Activations::Exact),
        "project: x has shape [1, 1, 32]: the last axis must be 64, the columns of the matrix",
    );
    says(packed.restore_rows(2, 2), "start 2: must be followed by 2 rows, but the matrix has 3");
    let ids =
        Tensor::<1, Int>::from_data(TensorData::new(vec![0u32; 7], [7]), (device, DType::U32));
    says(
        PackedMatrix::from_words(ids, packed.layout()),
        "words 7 of type U32: must be 30 of type U32",
    );
    let nothing = project(Tensor::zeros([1, 0, 64], device), &packed, Activations::Exact).unwrap();
    assert_eq!(nothing.dims(), [1, 0, 3]);
}

/// The CPU must use the blocks in place. Other devices receive a copy.
fn blocks_of_a_file_are_not_copied(device: &Device) {
    let format = WeightFormat::Q5_1;
    let blocks = Blocks::random(&mut Rng::new(700), format, [4, 96]);
    let shared = Bytes::from_bytes_vec(blocks.bytes.clone()).shared();
    let at = shared.as_ptr();
    let packed = PackedMatrix::from_bytes(shared.clone(), format, blocks.shape, device).unwrap();
    let words = packed.words().clone();
    if at.addr().is_multiple_of(4)
        && matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_))
    {
        let words = words.clone().try_into_primitive::<burn::backend::Flex>().unwrap();
        assert_eq!(words.bytes().as_ptr(), at);
    }
    assert!(words.into_data().as_bytes() == blocks.bytes, "the blocks as they were");
    // Three blocks of 18 bytes are not whole words.
    let odd = Blocks::random(&mut Rng::new(701), WeightFormat::Q4_0, [3, 32]);
    let packed = device_blocks(&odd, device);
    assert_eq!(packed.words().dims(), [14]);
    let restored = host(packed.restore().unwrap());
    assert_eq!(restored, odd.restored());
}

/// Splits matrices by a small limit in place of the device's, at rows of whole words and others,
/// from mapped bytes at any address.
fn matrices_beyond_a_buffer_are_split(device: &Device) {
    let cases = [
        (WeightFormat::Q4_0, [23, 96], 4 * 54, 6),
        (WeightFormat::Mxfp4, [23, 96], 4 * 51, 6),
        (WeightFormat::Q5K, [5, 512], 352, 5),
        (WeightFormat::F16, [9, 64], 300, 5),
        (WeightFormat::Q4_0, [23, 96], 1 << 20, 1),
    ];
    for (i, (format, shape, most, n)) in cases.into_iter().enumerate() {
        let mut rng = Rng::new(650 + i as u64);
        let ([rows, columns], blocks) = (shape, Blocks::random(&mut rng, format, shape));
        let bytes = Bytes::from_bytes_vec(blocks.bytes.clone()).shared();
        let parts =
            PackedMatrix::parts_from_bytes(bytes, format, shape, Some(most), device).unwrap();
        let name = format!("{format} {shape:?} in buffers of {most}");
        assert_eq!(parts.len(), n, "{name}");
        assert!(parts.iter().all(|part| 4 * part.layout().words() as u64 <= most), "{name}");
        let parts: Vec<_> = parts.iter().collect();
        let whole = device_blocks(&blocks, device);

        let ids = (0..3 * rows as i64).map(|i| i * 7 % (rows as i64 + 2)).collect::<Vec<_>>();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [3, rows]), device);
        let found = lookup_parts(ids.clone(), &parts).unwrap();
        assert_eq!(found.dims(), [3, rows, columns]);
        assert!(host(found) == host(lookup(ids, &whole).unwrap()), "{name}");

        for n in [1, 40] {
            let numbers = rng.normals(n * columns);
            let x = matrix(&numbers, columns, device);
            let project = |parts: &[&PackedMatrix]| {
                let fused = Fused::default();
                host(project_fused(x.clone(), parts, Activations::Exact, fused).unwrap())
            };
            let restored = magnitudes(&blocks.restored());
            let sums = reference::project(&magnitudes(&numbers), &restored, columns);
            let both = project(&parts).into_iter().zip(project(&[&whole]));
            for ((several, one), sum) in both.zip(sums) {
                // Products of many rows may be summed in another order. Each is off by less than
                // 2e-6 of the magnitudes.
                assert!(f64::from((several - one).abs()) <= 4e-6 * sum, "{name} by {n}");
            }
        }
    }
    let blocks = Blocks::random(&mut Rng::new(660), WeightFormat::Q4_0, [3, 32]);
    let bytes = || Bytes::from_bytes_vec(blocks.bytes.clone());
    says(
        PackedMatrix::parts_from_bytes(bytes(), blocks.format, blocks.shape, Some(35), device),
        "a matrix [3, 32] of q4_0 is not supported: 2 rows need 36 bytes, but a buffer of the \
         device holds at most 35",
    );
    let [a, b] = [[2, 32], [2, 64]].map(|shape| {
        device_blocks(&Blocks::random(&mut Rng::new(661), WeightFormat::Q8_0, shape), device)
    });
    let ids = || Tensor::<2, Int>::from_data([[0]], device);
    says(lookup_parts(ids(), &[]), "parts 0: must be one matrix or more");
    says(lookup_parts(ids(), &[&a, &b]), "columns 64: must be 32, as in the first part");
}

fn a_module_keeps_its_blocks(device: &Device) {
    #[derive(Module, Debug)]
    struct Layer {
        weight: PackedMatrix,
    }

    let blocks = Blocks::random(&mut Rng::new(800), WeightFormat::Q4K, [5, 256]);
    let layer = Layer { weight: device_blocks(&blocks, device) };
    assert_eq!(layer.num_params(), 0);
    assert!(list_param_ids(&layer).is_empty());
    assert_eq!(layer.devices(), std::slice::from_ref(device));
    let layer = layer.clone().fork(device).to_device(device).no_grad().valid();
    let restored = host(layer.weight.restore().unwrap());
    assert_eq!(restored, blocks.restored());
    assert!(format!("{layer}").contains("[5, 256] q4_k"), "{layer}");
    // Numbers past the end select the last row.
    let ids = Tensor::<2, Int>::from_data([[4, 99]], device);
    let rows = host(lookup(ids, &layer.weight).unwrap());
    assert_eq!(rows[..256], rows[256..]);
}

/// NaN affects all products of its row of activations, and none of other rows.
fn nan_reaches_all_products_of_its_row(device: &Device) {
    for n in [2, 40] {
        let blocks = Blocks::random(&mut Rng::new(900), WeightFormat::Q5_0, [7, 160]);
        let packed = device_blocks(&blocks, device);
        let mut x = Rng::new(901).normals(n * 160);
        x[35] = f32::NAN;
        for activations in [Activations::Exact, Activations::Int16, Activations::Int8] {
            let y = host(project(matrix(&x, 160, device), &packed, activations).unwrap());
            assert!(y[..7].iter().all(|y| y.is_nan()), "{activations:?}: {y:?}");
            assert!(y[7..].iter().all(|y| y.is_finite()), "{activations:?}");
        }
    }
}
