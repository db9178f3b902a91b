//! Where a data set lies: what the experiment says, or where `scripts/fetch-data` puts it, or where
//! the image has it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use stoker_trainer::datasets::{Cache, fetch};
use stoker_trainer::{Context, Result};

/// A folder with a data set's files: the experiment's `data`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Place {
    /// A path, or a URL with file, http, https, s3, gs or az.
    #[serde(default)]
    root: Option<String>,
    /// What files must hash to, by name: SHA-256 in hex. Others are taken as they are.
    #[serde(default)]
    sha256: BTreeMap<String, String>,
}

/// Where `scripts/build-images --data` puts data sets.
const IN_THE_IMAGE: &str = "/usr/local/share/stoker/data";

/// What can be missing, with its remedy.
const REMEDY: &str = "run scripts/fetch-data, or for pods scripts/build-images --data, or set \
                      data.root in the experiment to the folder or URL where the files are";

impl Place {
    /// Of the experiment, or else the folder `name` of the cache, or else that of the image.
    pub(crate) fn new(context: &Context, name: &str) -> Result<Self> {
        let mut place: Self = context.data()?;
        if place.root.is_none() {
            let cached = Cache::standard()?.folder().join(name);
            let brought = Path::new(IN_THE_IMAGE).join(name);
            let folder = if brought.exists() && !cached.exists() { brought } else { cached };
            place.root = Some(folder.to_string_lossy().into_owned());
        }
        Ok(place)
    }

    /// The first of `names` that is there, as a file of this machine.
    pub(crate) fn file(&self, names: &[&str]) -> Result<PathBuf> {
        let root = self.root.as_deref().unwrap_or_default().trim_end_matches('/');
        let mut first = None;
        for name in names {
            let sha256 = self.sha256.get(*name).map(String::as_str);
            match fetch(&format!("{root}/{name}"), sha256) {
                Ok(path) => return Ok(path),
                Err(error) if error.is_missing() => first = first.or(Some(error)),
                Err(error) => return Err(error.into()),
            }
        }
        let error = first.map_or_else(|| "no file is named".into(), |error| error.to_string());
        Err(format!("{error} ({REMEDY})").into())
    }
}

/// A test of an experiment's file.
#[cfg(test)]
pub(crate) fn test_of(experiment: &str) -> stoker_trainer::testing::TrialTest {
    let experiment: serde_json::Value = serde_saphyr::from_str(experiment).unwrap();
    stoker_trainer::testing::TrialTest::of_experiment(&experiment).unwrap()
}
