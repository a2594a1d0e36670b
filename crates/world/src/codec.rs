//! Frames to latents and back.

use std::{
    collections::HashMap,
    fs,
    io::{self, Write},
    path::Path,
};

use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use crate::{Error, Frame, Result};

/// A linear autoencoder of square patches of frames by principal component analysis. A patch is
/// encoded as its coordinates along the axes of largest variance.
///
/// Coordinates are divided by numbers proportional to the square root of their deviation. Then
/// their mean square is 1, and coordinates of small variance still exceed noise.
#[derive(Clone, Debug, PartialEq)]
pub struct Codec {
    /// Pixels along a side of a patch.
    patch: usize,
    /// The mean patch, its rows of pixels of three colors from -1 to 1: `[numbers]`.
    mean: Vec<f32>,
    /// Orthonormal axes, `[channels, numbers]`.
    axes: Vec<f32>,
    /// Divisor of the coordinates along each axis, `[channels]`.
    scale: Vec<f32>,
}

/// Rounds of the iteration that finds the axes; what they leave out of order varies equally much.
const ROUNDS: usize = 60;

impl Codec {
    /// The file of a model's folder.
    pub const FILE: &'static str = "codec.safetensors";

    /// Fits a codec to `frames`: patches of `patch` pixels a side, latents of `channels` channels.
    ///
    /// # Errors
    /// [`Error::Argument`] for no frames, patches that do not divide a frame, or more channels than
    /// numbers in a patch.
    pub fn fit(frames: &[Frame], patch: usize, channels: usize) -> Result<Self> {
        if frames.is_empty() {
            return Err(Error::argument("frames", 0, "must be at least 1"));
        }
        if patch == 0 || !Frame::SIZE.is_multiple_of(patch) {
            let rule = format!("must divide the {} pixels of a frame", Frame::SIZE);
            return Err(Error::argument("patch", patch, rule));
        }
        let n = 3 * patch * patch;
        if channels == 0 || channels > n {
            let rule = format!("must be between 1 and the {n} numbers of a patch");
            return Err(Error::argument("channels", channels, rule));
        }
        let (mut sum, mut products, mut count) = (vec![0.0; n], vec![0.0; n * n], 0.0);
        for patch in frames.iter().flat_map(|frame| patches(frame, patch)) {
            count += 1.0;
            for (i, &a) in patch.iter().enumerate() {
                sum[i] += f64::from(a);
                let row = &mut products[i * n..][..n];
                row.iter_mut().zip(&patch).for_each(|(p, &b)| *p += f64::from(a * b));
            }
        }
        let mean: Vec<f64> = sum.iter().map(|sum| sum / count).collect();
        for (i, row) in products.chunks_mut(n).enumerate() {
            row.iter_mut().zip(&mean).for_each(|(p, m)| *p = *p / count - mean[i] * m);
        }
        let axes = largest_axes(&products, n, channels);
        let deviation =
            axes.iter().map(|axis| dot(&product(&products, axis), axis).max(0.0).sqrt());
        // Where nothing varies there is nothing to scale up.
        let deviation: Vec<f64> = deviation.map(|deviation| deviation.max(1e-3)).collect();
        let common = (deviation.iter().sum::<f64>() / channels as f64).sqrt();
        let floats = |numbers: &[f64]| numbers.iter().map(|&x| x as f32).collect::<Vec<_>>();
        let scale: Vec<f64> = deviation.iter().map(|d| d.sqrt() * common).collect();
        let (mean, axes) = (floats(&mean), floats(&axes.concat()));
        Ok(Self { patch, mean, axes, scale: floats(&scale) })
    }

    /// Latent pixels along a side of a frame.
    pub fn latent_size(&self) -> usize {
        Frame::SIZE / self.patch
    }

    /// Channels of a latent pixel.
    pub fn channels(&self) -> usize {
        self.scale.len()
    }

    /// The latent of a frame, `[channels, size, size]`.
    pub fn encode(&self, frame: &Frame) -> Vec<f32> {
        let (channels, pixels) = (self.channels(), self.latent_size().pow(2));
        let mut latent = vec![0.0; channels * pixels];
        for (at, mut patch) in patches(frame, self.patch).enumerate() {
            patch.iter_mut().zip(&self.mean).for_each(|(x, mean)| *x -= mean);
            let axes = self.axes.chunks(self.mean.len()).zip(&self.scale);
            for (channel, (axis, scale)) in axes.enumerate() {
                let along: f32 = axis.iter().zip(&patch).map(|(a, x)| a * x).sum();
                latent[channel * pixels + at] = along / scale;
            }
        }
        latent
    }

    /// The frame of a latent.
    ///
    /// # Panics
    /// When the latent has another size.
    pub fn decode(&self, latent: &[f32]) -> Frame {
        let (size, pixels) = (self.latent_size(), self.latent_size().pow(2));
        assert_eq!(latent.len(), self.channels() * pixels, "numbers of a latent");
        let mut rgb = vec![0; 3 * Frame::SIZE * Frame::SIZE];
        for at in 0..pixels {
            let mut patch = self.mean.clone();
            let axes = self.axes.chunks(self.mean.len()).zip(&self.scale);
            for (channel, (axis, scale)) in axes.enumerate() {
                let along = latent[channel * pixels + at] * scale;
                patch.iter_mut().zip(axis).for_each(|(x, a)| *x += along * a);
            }
            let (row, column) = (at / size * self.patch, at % size * self.patch);
            for (i, line) in patch.chunks(3 * self.patch).enumerate() {
                let start = 3 * ((row + i) * Frame::SIZE + column);
                let bytes =
                    line.iter().map(|x| ((x + 1.0) * 127.5).round().clamp(0.0, 255.0) as u8);
                rgb[start..].iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
            }
        }
        Frame::from_rgb(rgb)
    }

    /// Writes [`FILE`](Self::FILE) into a folder, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written; an existing file is then unchanged.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let path = folder.join(Self::FILE);
        let (channels, numbers) = (self.channels(), self.mean.len());
        let tensors = [
            ("mean", vec![numbers], &self.mean),
            ("axes", vec![channels, numbers], &self.axes),
            ("scale", vec![channels], &self.scale),
        ];
        let bytes = tensors
            .each_ref()
            .map(|(.., numbers)| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
            Ok((*name, view.map_err(|error| malformed(&path, error))?))
        });
        let views = views.collect::<Result<HashMap<_, _>>>()?;
        let file = safetensors::serialize(&views, None).map_err(|error| malformed(&path, error))?;
        write(&path, &file).map_err(|source| Error::Io { path, source })
    }

    /// Reads [`FILE`](Self::FILE) of a folder.
    ///
    /// # Errors
    /// A file that is not there or not one of [`save`](Self::save).
    pub fn load(folder: &Path) -> Result<Self> {
        let path = folder.join(Self::FILE);
        let bytes = fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| malformed(&path, error))?;
        let tensor = |name: &str| -> Result<(Vec<usize>, Vec<f32>)> {
            let tensor = tensors.tensor(name).map_err(|error| malformed(&path, error))?;
            if tensor.dtype() != Dtype::F32 {
                return Err(malformed(&path, format!("{name} is {}, not F32", tensor.dtype())));
            }
            let numbers = tensor.data().chunks_exact(4);
            let numbers: Vec<f32> =
                numbers.map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
            match numbers.iter().all(|x| x.is_finite()) {
                true => Ok((tensor.shape().to_vec(), numbers)),
                false => Err(malformed(&path, format!("{name} is not finite"))),
            }
        };
        let [(of_mean, mean), (of_axes, axes), (of_scale, scale)] =
            [tensor("mean")?, tensor("axes")?, tensor("scale")?];
        let (n, channels) = (mean.len(), scale.len());
        let patch = (n / 3).isqrt();
        let divides = patch > 0 && Frame::SIZE.is_multiple_of(patch) && 3 * patch * patch == n;
        let fits = of_mean == [n] && of_axes == [channels, n] && of_scale == [channels];
        if !divides || !fits || channels == 0 {
            let why = format!(
                "mean {of_mean:?}, axes {of_axes:?} and scale {of_scale:?} are of no codec"
            );
            return Err(malformed(&path, why));
        }
        // Coordinates are divided by it.
        if let Some(wrong) = scale.iter().find(|&&scale| scale <= 0.0) {
            return Err(malformed(&path, format!("scale has {wrong}, all of it must be above 0")));
        }
        Ok(Self { patch, mean, axes, scale })
    }
}

/// Writes a file under a temporary name in the same folder, syncs it, and renames it.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new();
    // Those of any new file, for its owner alone otherwise.
    #[cfg(unix)]
    file.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = file.prefix(".unfinished-").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

fn malformed(path: &Path, why: impl ToString) -> Error {
    Error::Malformed { path: path.into(), why: why.to_string() }
}

/// Returns the patches of a frame row by row, with colors from -1 to 1.
fn patches(frame: &Frame, patch: usize) -> impl Iterator<Item = Vec<f32>> {
    let along = Frame::SIZE / patch;
    (0..along * along).map(move |at| {
        let (row, column) = (at / along * patch, at % along * patch);
        let lines = (0..patch).flat_map(|i| {
            let start = 3 * ((row + i) * Frame::SIZE + column);
            &frame.rgb()[start..start + 3 * patch]
        });
        lines.map(|&byte| f32::from(byte) / 127.5 - 1.0).collect()
    })
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Multiplies a symmetric matrix by a vector.
fn product(matrix: &[f64], vector: &[f64]) -> Vec<f64> {
    matrix.chunks(vector.len()).map(|row| dot(row, vector)).collect()
}

/// The axes in which `covariance`, of n rows, is largest, by orthogonal iteration (Golub and Van
/// Loan, 2013, 8.2.4).
fn largest_axes(covariance: &[f64], n: usize, count: usize) -> Vec<Vec<f64>> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(0);
    let random = |_| (0..n).map(|_| rng.random::<f64>() - 0.5).collect();
    let mut axes: Vec<Vec<f64>> = (0..count).map(random).collect();
    for _ in 0..ROUNDS {
        axes = axes.iter().map(|axis| product(covariance, axis)).collect();
        for i in 0..count {
            let (before, rest) = axes.split_at_mut(i);
            let axis = &mut rest[0];
            // Twice, since what rounding leaves of the first time is not orthogonal.
            for other in before.iter().chain(before.iter()) {
                let along = dot(axis, other);
                axis.iter_mut().zip(other).for_each(|(x, y)| *x -= along * y);
            }
            let norm = dot(axis, axis).sqrt().max(f64::MIN_POSITIVE);
            axis.iter_mut().for_each(|x| *x /= norm);
        }
    }
    axes
}
