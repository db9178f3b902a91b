//! `stoker validate`: reports all errors of a file at once.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::failure::error_value;
use crate::file::{self, FileError};
use crate::print::{self, Output};

/// Arguments of `stoker validate`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Experiment or inference job file (YAML)
    file: PathBuf,
    /// Override a field of the file, such as searcher.random.maxTrials=4; repeatable
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

/// Content of a valid file as JSON, with human-readable notes.
struct Valid {
    json: Value,
    notes: Vec<String>,
}

fn read(args: &Args) -> Result<Valid, FileError> {
    if file::is_job(&args.file) {
        let loaded = file::load_job(&args.file, &args.set)?;
        let json = json!({"valid": true, "job": loaded.name, "spec": loaded.valid.spec});
        return Ok(Valid { json, notes: loaded.notes });
    }
    let loaded = file::load(&args.file, &args.set)?;
    let json = json!({
        "valid": true,
        "experiment": loaded.name,
        "notes": loaded.notes,
        "spec": loaded.spec_json,
    });
    Ok(Valid { json, notes: loaded.notes })
}

/// Checks the file and returns the exit code.
pub(crate) fn validate(args: &Args, output: Output) -> u8 {
    match read(args) {
        Ok(valid) => {
            match output {
                Output::Json => print::out(valid.json),
                Output::Text => {
                    valid.notes.iter().for_each(print::err);
                    print::out(format!("{} is valid", args.file.display()));
                }
            }
            0
        }
        Err(error) => {
            if output == Output::Json {
                print::out(json!({"valid": false, "errors": error}));
            } else {
                print::err(error);
            }
            2
        }
    }
}

/// Prints the errors of a file and returns the exit code.
pub(crate) fn print_error(error: &FileError, output: Output) -> u8 {
    match output {
        Output::Json => {
            let mut value = error_value("file", &error.to_string(), 2);
            value["error"]["file"] = json!(error.path);
            value["error"]["errors"] = json!(error);
            print::err(value);
        }
        Output::Text => print::err(error),
    }
    2
}
