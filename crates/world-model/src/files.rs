//! Reads and writes the files of GameRFT, with tensors under the authors' names.

use std::{fs, path::Path};

use burn::tensor::{DType, Device};

use crate::{
    Block, Config, ControlEmbedding, GameRft, Mlp,
    embed::{CONTROL_WIDTH, LEVEL_WIDTH, MOUSE_WIDTH},
};
use kv_models::{
    Error, LoadOptions, QuantizeOptions, Result, Role, Roles, WeightDtype,
    checkpoint::{Exports, Names, Weights},
    files::{failed, pretty, read_to_string, write},
    load::open_folder,
    nn::Linear,
    save::{QuantizedExports, check_absent, new_folder, write_weights},
};

const NAMES: Names = Names {
    family: "GameRFT",
    // Checkpoints of the authors' training loop have this prefix.
    prefix: "core.",
    layers: "transformer.blocks.",
    embedding: "proj_in.weight",
    head: "proj_out.proj.weight",
    ..Names::NONE
};

/// The names in written files.
const WRITTEN: Names = Names { prefix: "", ..NAMES };

/// The name of a projection in files, its shape `[d_output, d_input]`, and whether it has a bias.
type Projection = (String, [usize; 2], bool);

/// Returns the projections of an MLP.
fn mlp(name: &str, [input, hidden, output]: [usize; 3]) -> [Projection; 2] {
    [
        (format!("{name}.fc1"), [hidden, input], true),
        (format!("{name}.fc2"), [output, hidden], true),
    ]
}

/// Returns the projections outside the layers: input, level (2), angle, mouse (2), buttons (2),
/// norm, output.
fn outer(config: &Config) -> [Projection; 10] {
    let Config { d_model, channels, n_buttons, .. } = *config;
    let [level_up, level_down] = mlp("t_embed.mlp", [LEVEL_WIDTH, 4 * d_model, d_model]);
    let [mouse_up, mouse_down] =
        mlp("control_embed.mouse.mlp", [MOUSE_WIDTH, CONTROL_WIDTH, d_model]);
    let [buttons_up, buttons_down] =
        mlp("control_embed.button.proj", [n_buttons, CONTROL_WIDTH, d_model]);
    let angle = "control_embed.mouse.angle_proj".into();
    [
        ("proj_in".into(), [d_model, channels], false),
        level_up,
        level_down,
        (angle, [MOUSE_WIDTH / 2, 2], false),
        mouse_up,
        mouse_down,
        buttons_up,
        buttons_down,
        ("proj_out.norm.fc".into(), [2 * d_model, d_model], true),
        ("proj_out.proj".into(), [channels, d_model], true),
    ]
}

/// Returns the projections of layer `i` in the order of [`Block`].
fn inner(config: &Config, i: usize) -> [Projection; 8] {
    let d_model = config.d_model;
    let name = |part: &str| format!("{}{i}.{part}", NAMES.layers);
    let [up, down] = mlp(&name("mlp"), [d_model, 4 * d_model, d_model]);
    [
        (name("adaln1.fc"), [2 * d_model, d_model], true),
        (name("attn.qkv"), [3 * d_model, d_model], true),
        (name("attn.out"), [d_model, d_model], true),
        (name("gate1.fc_c"), [d_model, d_model], true),
        (name("adaln2.fc"), [2 * d_model, d_model], true),
        up,
        down,
        (name("gate2.fc_c"), [d_model, d_model], true),
    ]
}

impl GameRft {
    /// Loads a folder with `config.json` and weights, possibly sharded, in f32, f16 or bf16, or
    /// [quantized](Self::save_quantized). The model computes in f32.
    ///
    /// # Errors
    /// Fails for a file that is missing or damaged, for a field that breaks a rule, and for a
    /// tensor that is missing, left over, not finite, or of another shape.
    pub fn load(folder: impl AsRef<Path>, device: &Device) -> Result<Self> {
        Self::load_with(folder, device, LoadOptions::default())
    }

    /// Loads a folder as [`load`](Self::load) does, with these options. Weights may stay packed, or
    /// the model may compute in f16 or bf16.
    ///
    /// # Errors
    /// Fails as [`load`](Self::load) does, and for options that the device does not support.
    pub fn load_with(
        folder: impl AsRef<Path>,
        device: &Device,
        options: LoadOptions,
    ) -> Result<Self> {
        let folder = folder.as_ref();
        let path = folder.join("config.json");
        let config = Config::from_json(&read_to_string(&path)?, &path)?;
        Self::import(config, &mut open_folder(folder, device, options)?)
    }

    /// Builds the model, taking each tensor out of `weights` as it goes.
    fn import(config: Config, weights: &mut Weights) -> Result<Self> {
        weights.named(&NAMES)?;
        let mut take = |(name, [rows, columns], bias): Projection| {
            weights.linear(&[(name, rows)], columns, bias)
        };
        let [input, level_up, level_down, angle, mouse_up, mouse_down, up, down, norm, output] =
            outer(&config);
        let input = take(input)?;
        let level = Mlp { up: take(level_up)?, down: take(level_down)? };
        let controls = ControlEmbedding {
            angle: take(angle)?,
            mouse: Mlp { up: take(mouse_up)?, down: take(mouse_down)? },
            buttons: Mlp { up: take(up)?, down: take(down)? },
        };
        let mut layers = Vec::new();
        for i in 0..config.n_layers {
            let [attention_norm, qkv, output, attention_gate, mlp_norm, up, down, mlp_gate] =
                inner(&config, i);
            layers.push(Block {
                attention_norm: take(attention_norm)?,
                qkv: take(qkv)?,
                output: take(output)?,
                attention_gate: take(attention_gate)?,
                mlp_norm: take(mlp_norm)?,
                mlp: Mlp { up: take(up)?, down: take(down)? },
                mlp_gate: take(mlp_gate)?,
            });
        }
        let (norm, output) = (take(norm)?, take(output)?);
        weights.finish()?;
        Ok(Self { input, level, controls, layers, norm, output, config })
    }

    /// Returns the tensors of a checkpoint.
    fn exports(&self) -> Exports {
        let mut exports = Exports::new(&WRITTEN);
        let mut give = |(name, [rows, _], _): Projection, linear: &Linear| {
            exports.linear(&[(name, rows)], linear);
        };
        let Self { input, level, controls, layers, norm, output, config } = self;
        let ControlEmbedding { angle, mouse, buttons } = controls;
        let linears = [
            input,
            &level.up,
            &level.down,
            angle,
            &mouse.up,
            &mouse.down,
            &buttons.up,
            &buttons.down,
            norm,
            output,
        ];
        outer(config)
            .into_iter()
            .zip(linears)
            .for_each(|(projection, linear)| give(projection, linear));
        for (i, layer) in layers.iter().enumerate() {
            let linears = [
                &layer.attention_norm,
                &layer.qkv,
                &layer.output,
                &layer.attention_gate,
                &layer.mlp_norm,
                &layer.mlp.up,
                &layer.mlp.down,
                &layer.mlp_gate,
            ];
            inner(config, i)
                .into_iter()
                .zip(linears)
                .for_each(|(projection, linear)| give(projection, linear));
        }
        exports
    }

    /// Writes a folder with `model.safetensors` and `config.json` that [`load`](Self::load) and the
    /// authors' code read. Creates the folder if necessary. The weights get their name when they
    /// are complete.
    ///
    /// # Errors
    /// Fails with one line naming the file if it cannot be written, or if a weight is not finite or
    /// does not fit `dtype`.
    pub fn save(&self, folder: impl AsRef<Path>, dtype: WeightDtype) -> Result<()> {
        let folder = folder.as_ref();
        let dtype = dtype.dtype().unwrap_or(DType::F32);
        fs::create_dir_all(folder).map_err(failed(folder))?;
        let path = folder.join("model.safetensors");
        let weights = write_weights(&path, self.exports(), dtype)?;
        weights.persist(&path).map_err(|error| failed(&path)(error.error))?;
        write(&folder.join("config.json"), &pretty(&self.config.to_json()))
    }

    /// Writes a new folder with quantized matrices that [`load_with`](Self::load_with) reads packed
    /// or restored: `model.safetensors` in the format of
    /// [`save_quantized`](kv_models::save_quantized), `config.json`, and what `others` writes into
    /// it.
    ///
    /// The format of MLPs is also used for the projections of levels, controls and conditions, the
    /// one of embeddings for input and output. The first projections of the mouse's angle and of
    /// the buttons, which have two columns and a column for each button, stay in float, in f16
    /// unless the options name a type.
    ///
    /// # Errors
    /// Fails as [`QuantizedExports`] and [`new_folder`] do, and as `others` does. Nothing is left
    /// on the disk then.
    pub fn save_quantized<E: From<Error>>(
        &self,
        folder: &Path,
        options: QuantizeOptions<'_>,
        others: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<(), E> {
        check_absent(folder)?;
        let path = folder.join("model.safetensors");
        let dtype = options.dtype.dtype().unwrap_or(DType::F16);
        let quantized =
            QuantizedExports::new(self.exports(), &self.roles(), options, dtype, &path)?;
        let mut config = self.config.to_json();
        config.insert("quantization_config".into(), quantized.config());
        new_folder(folder, options.stop, |folder| {
            let at = folder.join("model.safetensors");
            let weights = quantized.write(&at, &path)?;
            weights.persist(&at).map_err(|error| failed(&path)(error.error))?;
            write(&folder.join("config.json"), &pretty(&config))?;
            others(folder)
        })
    }

    /// Returns the roles of all matrices that can be quantized.
    fn roles(&self) -> Roles {
        let mut roles = Roles::default();
        let Self { input, level, controls, layers, norm, output, .. } = self;
        roles.add(Role::Embedding, input);
        roles.add(Role::Head, output);
        roles.add(Role::Mlp, level);
        roles.add(Role::Mlp, &controls.mouse);
        roles.add(Role::Mlp, &controls.buttons.down);
        roles.add(Role::Mlp, norm);
        for layer in layers {
            roles.add(Role::Mlp, layer);
            roles.add(Role::Qkv, &layer.qkv);
            roles.add(Role::AttentionOutput, &layer.output);
        }
        roles
    }
}
