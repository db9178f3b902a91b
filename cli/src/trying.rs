//! `--test`: an experiment cut down to one batch, a validation, a checkpoint and its restore.

use std::path::PathBuf;

use serde_json::json;
use stoker_api::experiment::{EnvVar, Length, SingleSearch, Unit};
use stoker_api::names::{ENV_TEST, experiment_path};
use stoker_api::validate::validate;
use stoker_storage::Storage;

use crate::failure::Failure;
use crate::file::Loaded;
use crate::place::Place;
use crate::run::{Paths, record};

/// What the name of an experiment that is tried ends with.
const SUFFIX: &str = "-test";
/// The longest name of an experiment.
const NAME_MAX: usize = 40;

/// What `loaded` is tried as: one trial with the first draw, of one batch, which is not started again.
///
/// # Errors
///
/// It cannot be cut down.
pub(crate) fn cut_down(mut loaded: Loaded) -> Result<Loaded, Failure> {
    let mut spec = loaded.valid.spec.clone();
    let searcher = &mut spec.searcher;
    (searcher.random, searcher.grid) = (None, None);
    searcher.single = Some(SingleSearch {});
    searcher.max_length = Length::new(Unit::Batches, 1);
    (spec.min_validation_period, spec.min_checkpoint_period) = (None, None);
    spec.perform_initial_validation = false;
    spec.max_restarts = 0;
    spec.env.retain(|it| it.name != ENV_TEST);
    spec.env.push(EnvVar { name: ENV_TEST.to_owned(), value: "1".to_owned() });
    let stem = &loaded.name[..loaded.name.len().min(NAME_MAX - SUFFIX.len())];
    let name = format!("{}{SUFFIX}", stem.trim_end_matches('-'));
    loaded.valid = validate(&name, &spec).map_err(|errors| {
        let errors = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        Failure::Input(format!("the experiment cannot be tried: {errors}"))
    })?;
    loaded.spec_json = json!(loaded.valid.spec);
    loaded.name = name;
    Ok(loaded)
}

/// Where an experiment is tried that names no place: a folder of its own.
pub(crate) fn folder() -> Result<PathBuf, Failure> {
    Ok(std::env::temp_dir().join(format!("stoker-test-{}", record::random_hex(8)?)))
}

/// Deletes all that a trial run has left.
pub(crate) async fn clean(place: &Place, storage: &Storage, paths: &Paths) -> Result<(), Failure> {
    let folder = experiment_path(&paths.namespace, &paths.name, &paths.uid);
    storage.delete_folder(&format!("{folder}/")).await?;
    let remove = |path: PathBuf, done: std::io::Result<()>| match done {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::file("delete", &path, error))
        }
        _ => Ok(()),
    };
    let key = format!("{}.{}", paths.namespace, paths.name);
    for ending in ["current", "lock", "trainers"] {
        let path = place.local().join(format!("{key}.{ending}"));
        let done = std::fs::remove_file(&path);
        remove(path, done)?;
    }
    let record = place.record(&paths.name, &paths.uid);
    let record = record.parent().map_or(record.clone(), PathBuf::from);
    let done = std::fs::remove_dir_all(&record);
    remove(record, done)
}
