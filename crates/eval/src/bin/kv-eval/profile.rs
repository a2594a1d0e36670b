//! `--profile FILE`: where the time goes, as a page.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::{Result, bail};
use burn::tensor::Device;
use kv_cli::{OutFile, note};
use kv_cubecl::{On, Target};
use kv_eval::{Versions, device_name};
use kv_models::LanguageModel;
use kv_profile::Recorder;

#[derive(Debug, clap::Args)]
pub(crate) struct ProfileArgs {
    /// Write a page here that shows where the time goes: a timeline of threads and of the device's queues by layer
    /// and operation, with sums. On WGPU and CUDA every launch is timed, which slows the host down.
    #[arg(long, global = true, value_name = "FILE")]
    profile: Option<PathBuf>,
}

/// A recording that will be written, or nothing.
#[must_use]
pub(crate) struct Profile(Option<Recording>);

struct Recording {
    recorder: Recorder,
    file: OutFile,
    path: PathBuf,
    facts: Vec<(String, String)>,
    device: Option<Device>,
}

impl ProfileArgs {
    /// Finds out whether the page can be written, and starts to record.
    pub(crate) fn start(&self) -> Result<Profile> {
        let Some(path) = &self.profile else { return Ok(Profile(None)) };
        if path == Path::new("-") {
            bail!("profile -: a page is written to a file, not to standard output");
        }
        let file = OutFile::open("profile", path)?;
        let recorder = Recorder::new();
        recorder.install()?;
        let date = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
        let command: Vec<String> = std::env::args().collect();
        let Versions { kv_eval, burn, cubecl } = Versions::BUILT;
        let facts = [
            ("date", date),
            ("version", format!("kv-eval {kv_eval}, burn {burn}, cubecl {cubecl}")),
            ("command", command.join(" ")),
        ];
        let facts = facts.map(|(name, value)| (name.to_string(), value)).to_vec();
        Ok(Profile(Some(Recording { recorder, file, path: path.clone(), facts, device: None })))
    }
}

impl Profile {
    /// Says where it runs, and compares the device's clock with the host's.
    pub(crate) fn device<T: Target>(&mut self, device: &On<T>) -> Result<()> {
        let Some(Recording { recorder, facts, device: at, .. }) = &mut self.0 else {
            return Ok(());
        };
        *at = Some((**device).clone());
        facts.push(("backend".into(), T::NAME.into()));
        facts.push(("adapter".into(), device_name(device)));
        Ok(recorder.calibrate(device)?)
    }

    /// Says which model runs; to be called before it does.
    pub(crate) fn model(&mut self, model: &LanguageModel, name: &str) {
        let Some(Recording { recorder, facts, .. }) = &mut self.0 else { return };
        recorder.name_operations(model);
        let (layers, mb) = (model.n_layers(), model.weight_bytes() as f64 / 1e6);
        let dtype = model.weight_dtype();
        facts.push(("model".into(), format!("{name}: {layers} layers, {mb:.1} MB of {dtype}")));
    }

    /// Adds a setting to the head of the page.
    pub(crate) fn fact(&mut self, name: &str, value: impl ToString) {
        if let Some(Recording { facts, .. }) = &mut self.0 {
            facts.push((name.into(), value.to_string()));
        }
    }

    /// Writes the page.
    pub(crate) fn finish(self) -> Result<()> {
        let Some(Recording { recorder, file, path, facts, device }) = self.0 else { return Ok(()) };
        if let Some(device) = device {
            recorder.calibrate(&device)?;
        }
        let page = recorder.finish("Where the time goes", facts).html();
        file.write(page.as_bytes())?;
        note(format_args!("the profile is in {}", path.display()));
        Ok(())
    }
}
