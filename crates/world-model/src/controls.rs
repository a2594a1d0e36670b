//! The inputs of a forward pass.

use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::Config;
use kv_models::{Error, Result};

/// The player's input in each frame, in f32, f16 or bf16.
#[derive(Clone, Debug)]
pub struct Controls {
    /// The movement of the mouse along both axes, `[batch, frames, 2]`.
    pub mouse: Tensor<3>,
    /// The buttons, 1 if pressed and otherwise 0, `[batch, frames, n_buttons]`.
    pub buttons: Tensor<3>,
}

impl Controls {
    /// Creates the controls of one frame from the mouse and the pressed buttons of each sequence of
    /// a batch.
    ///
    /// # Errors
    /// Fails with [`Error::Argument`] without a sequence, and for different numbers of buttons.
    pub fn of(players: &[([f32; 2], &[bool])], device: &Device) -> Result<Self> {
        let (batch, n_buttons) = (players.len(), players.first().map_or(0, |(_, b)| b.len()));
        if let Some((_, other)) = players.iter().find(|(_, buttons)| buttons.len() != n_buttons) {
            let rule = format!("must be {n_buttons} for every sequence of a batch");
            return Err(Error::argument("buttons", other.len(), rule));
        }
        if batch == 0 || n_buttons == 0 {
            return Err(Error::argument(
                "buttons",
                n_buttons,
                "must be at least 1, for at least one sequence",
            ));
        }
        let mouse: Vec<f32> = players.iter().flat_map(|(mouse, _)| *mouse).collect();
        let buttons = players.iter().flat_map(|(_, buttons)| *buttons);
        let buttons: Vec<f32> = buttons.map(|&pressed| f32::from(u8::from(pressed))).collect();
        Ok(Self {
            mouse: Tensor::from_data(TensorData::new(mouse, [batch, 1, 2]), device),
            buttons: Tensor::from_data(TensorData::new(buttons, [batch, 1, n_buttons]), device),
        })
    }

    /// Returns the controls of frame `i` alone.
    ///
    /// # Panics
    /// Panics when there is no such frame.
    pub fn frame(&self, i: usize) -> Self {
        let [mouse, buttons] =
            [&self.mouse, &self.buttons].map(|side| side.clone().narrow(1, i, 1));
        Self { mouse, buttons }
    }
}

/// Noised frames with their conditions, in f32, f16 or bf16.
#[derive(Clone, Debug)]
pub struct Noised {
    /// `(1 - t) picture + t noise`, `[batch, frames, channels, height, width]`.
    pub x: Tensor<5>,
    /// The noise levels t, from 0 for a picture to 1 for noise, `[batch, frames]`.
    pub t: Tensor<2>,
    /// The player's input.
    pub controls: Controls,
}

impl Noised {
    /// Converts to f32, in which levels and controls are embedded.
    pub(super) fn in_f32(self) -> Self {
        let Self { x, t, controls: Controls { mouse, buttons } } = self;
        let controls =
            Controls { mouse: mouse.cast(DType::F32), buttons: buttons.cast(DType::F32) };
        Self { x: x.cast(DType::F32), t: t.cast(DType::F32), controls }
    }

    /// Checks that all shapes fit a model of `config` and that all tensors are on its device.
    /// Returns batch and frames.
    pub(super) fn check(&self, config: &Config, device: Option<&Device>) -> Result<[usize; 2]> {
        let [batch, frames, ..] = self.x.dims();
        let Config { channels, sample_size, n_buttons, .. } = *config;
        let Controls { mouse, buttons } = &self.controls;
        check_shape("x", &self.x, [batch, frames, channels, sample_size, sample_size])?;
        check_shape("t", &self.t, [batch, frames])?;
        check_shape("mouse", mouse, [batch, frames, 2])?;
        check_shape("buttons", buttons, [batch, frames, n_buttons])?;
        for (field, found) in [
            ("x", self.x.device()),
            ("t", self.t.device()),
            ("mouse", mouse.device()),
            ("buttons", buttons.device()),
        ] {
            check_device(field, &found, device)?;
        }
        Ok([batch, frames])
    }
}

/// Checks the shape of an argument.
pub(super) fn check_shape<const D: usize>(
    field: &'static str,
    tensor: &Tensor<D>,
    wanted: [usize; D],
) -> Result<()> {
    let found = tensor.dims();
    match found == wanted && !found.contains(&0) {
        true => Ok(()),
        false => {
            let rule = format!("must have shape {wanted:?} without a dimension 0");
            Err(Error::argument(field, format!("{found:?}"), rule))
        }
    }
}

/// Checks that an argument on `found` is on the model's device.
pub(super) fn check_device(
    field: &'static str,
    found: &Device,
    device: Option<&Device>,
) -> Result<()> {
    match device.filter(|device| *device != found) {
        None => Ok(()),
        Some(device) => {
            let rule = format!("must be on the model's device, {device:?}");
            Err(Error::argument(field, format!("a tensor on {found:?}"), rule))
        }
    }
}
