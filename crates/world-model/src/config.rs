//! The configuration of GameRFT, read from `config.json`.

use std::path::Path;

use kv_cubecl::Frames;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use kv_models::{
    ConfigJson, Error, Result,
    fields::{head_dim, layers, required, sizes},
};

/// The configuration of a model, with all defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Layers.
    pub n_layers: usize,
    /// Heads.
    pub n_heads: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Latent pixels along a side of a frame.
    pub sample_size: usize,
    /// Channels of a latent pixel.
    pub channels: usize,
    /// Buttons.
    pub n_buttons: usize,
    /// The frames over which training spread positions in time from -1 to 1. Positions of later
    /// frames exceed 1.
    pub n_frames: usize,
    /// Layers 0, `local_idx`, 2 `local_idx`, .. see the global window, the others the local one.
    pub local_idx: usize,
    /// Recent frames that a frame sees in local layers, including itself.
    pub local_window: Frames,
    /// Recent frames that a frame sees in global layers, including itself; `None` for all.
    pub global_window: Option<Frames>,
}

impl Config {
    /// Returns the tokens per frame.
    pub const fn tokens_per_frame(&self) -> usize {
        self.sample_size * self.sample_size
    }

    /// Returns the channels per head.
    pub const fn head_dim(&self) -> usize {
        self.d_model / self.n_heads
    }

    /// Returns whether layer `i` has the local window.
    pub const fn is_local(&self, i: usize) -> bool {
        !i.is_multiple_of(self.local_idx)
    }

    /// Returns the number of recent frames that a frame sees in layer `i`, including itself: at
    /// most `most`.
    pub fn window(&self, i: usize, most: Frames) -> Frames {
        match self.is_local(i) {
            true => self.local_window.min(most),
            false => self.global_window.unwrap_or(most).min(most),
        }
    }

    /// Checks the values that the tensors' shapes do not check; `path` is for the message.
    ///
    /// # Errors
    /// Fails with [`Error::Config`] for the first field that breaks a rule.
    pub fn check(&self, path: &Path) -> Result<()> {
        layers(path, "n_layers", self.n_layers)?;
        let fields = [
            ("n_heads", self.n_heads),
            ("d_model", self.d_model),
            ("sample_size", self.sample_size),
            ("channels", self.channels),
            ("n_buttons", self.n_buttons),
            ("n_frames", self.n_frames),
            ("local_idx", self.local_idx),
        ];
        sizes(path, &fields)?;
        let head_dim = head_dim(path, ("d_model", self.d_model), ("n_heads", self.n_heads))?;
        let fail = |field: &str, value: &dyn ToString, rule: &str| {
            Err(Error::config(path, field, value.to_string(), rule))
        };
        if !head_dim.is_multiple_of(8) {
            let rule = "over n_heads must be a multiple of 8: rope covers three axes with a \
                        quarter of the channels each";
            return fail("d_model", &self.d_model, rule);
        }
        if self.sample_size > 1 << 10 {
            return fail("sample_size", &self.sample_size, "must be at most 1024");
        }
        if self.n_frames < 2 {
            return fail("n_frames", &self.n_frames, "must be at least 2");
        }
        let windows =
            [("local_window", Some(self.local_window)), ("global_window", self.global_window)];
        for (field, window) in windows {
            if let Some(Frames(window @ (0 | 1))) = window {
                return fail(field, &window, "must be at least 2 frames");
            }
        }
        Ok(())
    }

    /// Resolves `config.json`.
    ///
    /// # Errors
    /// Fails for a field that is missing or contradictory, and for an unsupported feature.
    pub fn from_json(text: &str, path: &Path) -> Result<Self> {
        ConfigJson { text, path }.parse::<Raw>()?.resolve(path)
    }

    /// Returns the fields of `config.json` that [`from_json`](Self::from_json) reads.
    pub(super) fn to_json(&self) -> Map<String, Value> {
        [
            ("n_layers", json!(self.n_layers)),
            ("n_heads", json!(self.n_heads)),
            ("d_model", json!(self.d_model)),
            ("sample_size", json!(self.sample_size)),
            ("channels", json!(self.channels)),
            ("tokens_per_frame", json!(self.tokens_per_frame())),
            ("n_buttons", json!(self.n_buttons)),
            ("n_mouse_axes", json!(MOUSE_AXES)),
            ("n_frames", json!(self.n_frames)),
            ("causal", json!(true)),
            ("uncond", json!(false)),
            ("backbone", json!("dit")),
            ("rope_impl", json!("ortho")),
            ("has_audio", json!(false)),
            ("local_idx", json!(self.local_idx)),
            ("local_window", json!(self.local_window)),
            ("global_window", json!(self.global_window)),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into_iter()
        .collect()
    }
}

/// The axes of the mouse. The model sees its angle and length.
const MOUSE_AXES: usize = 2;

/// The fields of the authors' code that affect inference.
#[derive(Deserialize)]
struct Raw {
    n_layers: Option<usize>,
    n_heads: Option<usize>,
    d_model: Option<usize>,
    sample_size: Option<usize>,
    channels: Option<usize>,
    tokens_per_frame: Option<usize>,
    n_buttons: Option<usize>,
    n_mouse_axes: Option<usize>,
    n_frames: Option<usize>,
    causal: Option<bool>,
    uncond: Option<bool>,
    backbone: Option<String>,
    rope_impl: Option<String>,
    has_audio: Option<bool>,
    local_idx: Option<usize>,
    local_window: Option<Frames>,
    global_window: Option<Frames>,
}

impl Raw {
    fn resolve(self, path: &Path) -> Result<Config> {
        // The authors' code is not causal by default.
        let causal = required(path, "causal", self.causal)?;
        for (field, value, computed) in [
            ("causal", Some(causal), true),
            ("uncond", self.uncond, false),
            ("has_audio", self.has_audio, false),
        ] {
            if value.is_some_and(|value| value != computed) {
                let why = format!("{} sets it; only {computed} is supported", path.display());
                return Err(Error::unsupported(format!("{field} {}", !computed), why));
            }
        }
        for (field, value, computed) in
            [("backbone", &self.backbone, "dit"), ("rope_impl", &self.rope_impl, "ortho")]
        {
            if let Some(other) = value.as_ref().filter(|value| *value != computed) {
                let why = format!("{} has it; only {computed} is supported", path.display());
                return Err(Error::unsupported(format!("{field} {other}"), why));
            }
        }
        let config = Config {
            n_layers: required(path, "n_layers", self.n_layers)?,
            n_heads: required(path, "n_heads", self.n_heads)?,
            d_model: required(path, "d_model", self.d_model)?,
            sample_size: required(path, "sample_size", self.sample_size)?,
            channels: required(path, "channels", self.channels)?,
            n_buttons: required(path, "n_buttons", self.n_buttons)?,
            n_frames: required(path, "n_frames", self.n_frames)?,
            local_idx: self.local_idx.unwrap_or(4),
            local_window: required(path, "local_window", self.local_window)?,
            global_window: self.global_window,
        };
        config.check(path)?;
        for (field, value, rule) in [
            ("tokens_per_frame", self.tokens_per_frame, config.tokens_per_frame()),
            ("n_mouse_axes", self.n_mouse_axes, MOUSE_AXES),
        ] {
            if let Some(value) = value.filter(|value| *value != rule) {
                return Err(Error::config(path, field, value, format!("must be {rule}")));
            }
        }
        Ok(config)
    }
}
