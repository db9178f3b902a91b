//! CSV file with one row per epoch.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::Value;

use super::{Callback, CheckpointFiles, Control, Logs};
use crate::{Error, Result};

/// Writes the metrics of each epoch as a row of a CSV file: `epoch`, and one column per metric that
/// any epoch had. The file is complete after each epoch and keeps its rows across restarts.
/// Checkpoints contain it as `callbacks-NAME`, so the file names of several logs must differ.
#[derive(Clone, Debug, PartialEq)]
pub struct CsvLog {
    path: PathBuf,
    rows: Vec<(u64, Logs)>,
}

impl CsvLog {
    /// Writes to this file and replaces its contents.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), rows: vec![] }
    }

    fn file_name(&self) -> Cow<'_, str> {
        self.path.file_name().unwrap_or_default().to_string_lossy()
    }

    fn table(&self) -> Result<Vec<u8>> {
        let names: BTreeSet<&String> = self.rows.iter().flat_map(|(_, logs)| logs.keys()).collect();
        let mut writer = csv::Writer::from_writer(vec![]);
        writer.write_field("epoch")?;
        writer.write_record(&names)?;
        for (epoch, logs) in &self.rows {
            writer.write_field(epoch.to_string())?;
            let value = |name: &&String| logs.get(*name).map(f64::to_string).unwrap_or_default();
            writer.write_record(names.iter().map(value))?;
        }
        Ok(writer.into_inner().map_err(|error| error.into_error())?)
    }

    fn write(&self) -> Result<()> {
        let table = self.table()?;
        // Rename into place, so that readers never see a partial file.
        let part = self.part();
        std::fs::write(&part, table)
            .and_then(|()| std::fs::rename(&part, &self.path))
            .map_err(|error| self.write_error(&error))
    }

    /// Fails if the file cannot be written. Keeps the table of an earlier process, because only a
    /// restored checkpoint contains its rows.
    fn check_path(&self) -> Result<()> {
        let part = self.part();
        std::fs::write(&part, "")
            .and_then(|()| std::fs::remove_file(&part))
            .map_err(|error| self.write_error(&error))
    }

    fn part(&self) -> PathBuf {
        self.path.with_extension("part")
    }

    fn write_error(&self, error: &std::io::Error) -> Error {
        format!("cannot write {}: {error}", self.path.display()).into()
    }
}

impl Callback for CsvLog {
    fn chief_only(&self) -> bool {
        true
    }

    fn wants_batch_logs(&self) -> bool {
        false
    }

    fn on_train_begin(&mut self, control: &mut Control) -> Result<()> {
        // Check name and directory now, not hours later at the end of the first epoch.
        control.claim_file(&self.file_name())?;
        self.check_path()
    }

    fn on_epoch_end(&mut self, epoch: u64, logs: &Logs, _: &mut Control) -> Result<()> {
        self.rows.push((epoch, logs.clone()));
        self.write()
    }

    fn on_checkpoint(&mut self, files: &mut CheckpointFiles, _: &mut Control) -> Result<()> {
        files.add(&self.file_name(), self.table()?)
    }

    fn state(&self) -> Result<Value> {
        // Store bits: JSON cannot represent NaN.
        let bits = |logs: &Logs| -> BTreeMap<String, u64> {
            logs.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect()
        };
        let rows: Vec<_> = self.rows.iter().map(|(epoch, logs)| (epoch, bits(logs))).collect();
        Ok(serde_json::to_value(rows)?)
    }

    fn load_state(&mut self, state: Value) -> Result<()> {
        let rows: Vec<(u64, BTreeMap<String, u64>)> = serde_json::from_value(state)?;
        let logs = |bits: BTreeMap<String, u64>| -> Logs {
            bits.into_iter().map(|(name, bits)| (name, f64::from_bits(bits))).collect()
        };
        self.rows = rows.into_iter().map(|(epoch, bits)| (epoch, logs(bits))).collect();
        self.write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.csv");
        let read = || std::fs::read_to_string(&path).unwrap();
        let logs = |pairs: &[(&str, f64)]| -> Logs {
            pairs.iter().map(|(name, value)| ((*name).into(), *value)).collect()
        };
        let mut control = Control::default();
        let mut log = CsvLog::new(&path);
        log.on_epoch_end(0, &logs(&[("loss", f64::NAN)]), &mut control).unwrap();
        assert_eq!(read(), "epoch,loss\n0,NaN\n");
        let state = log.state().unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut log = CsvLog::new(&path);
        log.load_state(state).unwrap();
        assert_eq!(read(), "epoch,loss\n0,NaN\n");
        log.on_epoch_end(1, &logs(&[("loss", 0.5), ("val_loss", 0.25)]), &mut control).unwrap();
        assert_eq!(read(), "epoch,loss,val_loss\n0,NaN,\n1,0.5,0.25\n");
        let mut files = CheckpointFiles::default();
        log.on_checkpoint(&mut files, &mut control).unwrap();
        assert!(log.on_checkpoint(&mut files, &mut control).is_err());
        assert_eq!(files.into_files()["callbacks-log.csv"], read());
    }

    /// Checkpoints do not contain the directories.
    #[test]
    fn equal_file_names_fail_at_the_start() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("a")).unwrap();
        let mut control = Control::default();
        let mut begin = |name| CsvLog::new(folder.path().join(name)).on_train_begin(&mut control);
        begin("log.csv").unwrap();
        begin("a/other.csv").unwrap();
        let error = begin("a/log.csv").unwrap_err().to_string();
        let expected = "checkpoint file \"log.csv\" was already added by another callback; choose \
                        another file name";
        assert_eq!(error, expected);
    }

    #[test]
    fn write_error_names_the_file() {
        let (mut log, mut control) = (CsvLog::new("/nowhere/log.csv"), Control::default());
        let at_begin = log.on_train_begin(&mut control);
        let at_epoch_end = log.on_epoch_end(0, &Logs::new(), &mut control);
        for error in [at_begin, at_epoch_end].map(|written| written.unwrap_err()) {
            assert!(error.to_string().starts_with("cannot write /nowhere/log.csv"), "{error}");
        }
    }

    #[test]
    fn start_keeps_the_table_of_an_earlier_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.csv");
        std::fs::write(&path, "epoch,loss\n0,1\n").unwrap();
        CsvLog::new(&path).on_train_begin(&mut Control::default()).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "epoch,loss\n0,1\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
