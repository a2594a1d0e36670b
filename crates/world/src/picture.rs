//! Grids of frames as PNG files.

use crate::{Error, Frame, Result};

/// Frames in rows and columns.
#[derive(Clone, Debug)]
pub struct Picture {
    width: usize,
    height: usize,
    rgb: Vec<u8>,
}

/// Pixels between frames.
const GAP: usize = 2;
/// The color between frames.
const GROUND: u8 = 255;

impl Picture {
    /// A grid of frames, each pixel drawn as `zoom` times `zoom` ones; rows may be shorter than the
    /// first.
    ///
    /// # Errors
    /// [`Error::Argument`] for no frames or a `zoom` of 0.
    pub fn grid(rows: &[Vec<Frame>], zoom: usize) -> Result<Self> {
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        if columns == 0 || zoom == 0 {
            let rule = "must be at least 1, of at least one frame";
            return Err(Error::argument("zoom", zoom, rule));
        }
        let cell = Frame::SIZE * zoom + GAP;
        let [width, height] = [columns, rows.len()].map(|n| n * cell - GAP);
        let mut rgb = vec![GROUND; 3 * width * height];
        for (y, row) in rows.iter().enumerate() {
            for (x, frame) in row.iter().enumerate() {
                for line in 0..Frame::SIZE * zoom {
                    let start = 3 * ((y * cell + line) * width + x * cell);
                    let from = &frame.rgb()[3 * (line / zoom) * Frame::SIZE..];
                    for column in 0..Frame::SIZE * zoom {
                        let pixel = &from[3 * (column / zoom)..][..3];
                        rgb[start + 3 * column..][..3].copy_from_slice(pixel);
                    }
                }
            }
        }
        Ok(Self { width, height, rgb })
    }

    /// A PNG file of it.
    ///
    /// # Errors
    /// [`Error::Encode`] for one that is too large.
    pub fn png(&self) -> Result<Vec<u8>> {
        animation(core::slice::from_ref(self), 1)
    }
}

/// Encodes pictures of one size as an animated PNG that repeats; a single picture does not move.
///
/// # Errors
/// [`Error::Argument`] without pictures, for pictures of different sizes, or for 0 pictures per
/// second; [`Error::Encode`].
pub fn animation(pictures: &[Picture], per_second: u16) -> Result<Vec<u8>> {
    let Some(first) = pictures.first() else {
        return Err(Error::argument("pictures", 0, "must be at least 1"));
    };
    if per_second == 0 {
        return Err(Error::argument("per_second", per_second, "must be at least 1"));
    }
    let size = |picture: &Picture| (picture.width, picture.height);
    if let Some(other) = pictures.iter().find(|picture| size(picture) != size(first)) {
        let rule = format!("must be that of the first, {:?}", size(first));
        return Err(Error::argument("size", format!("{:?}", size(other)), rule));
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, first.width as u32, first.height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    encoder.set_filter(png::Filter::Adaptive);
    if pictures.len() > 1 {
        encoder.set_animated(pictures.len() as u32, 0)?;
        encoder.set_frame_delay(1, per_second)?;
    }
    let mut writer = encoder.write_header()?;
    for picture in pictures {
        writer.write_image_data(&picture.rgb)?;
    }
    writer.finish()?;
    Ok(file)
}
