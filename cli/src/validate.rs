//! `stoker validate`: every error of a file at once.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::file::{self, FileError};
use crate::print::{self, Output};

/// What `stoker validate` is asked to do.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The file of an experiment or of an inference job (YAML)
    file: PathBuf,
    /// Change a field of the file before it is read, such as searcher.random.maxTrials=4; may be
    /// given more than once
    #[arg(long, value_name = "PATH=VALUE")]
    set: Vec<String>,
}

/// What a valid file holds: for programs, and notes for people.
struct Valid {
    json: Value,
    notes: Vec<String>,
}

fn read(args: &Args) -> Result<Valid, FileError> {
    if file::is_job(&args.file) {
        let loaded = file::load_job(&args.file, &args.set)?;
        let json = json!({"valid": true, "job": loaded.name, "spec": loaded.valid.spec});
        return Ok(Valid { json, notes: vec![] });
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

/// Checks the file; returns the exit code.
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

/// Prints what is wrong with a file; returns the exit code.
pub(crate) fn print_error(error: &FileError, output: Output) -> u8 {
    match output {
        Output::Json => print::err(json!({"errors": error})),
        Output::Text => print::err(error),
    }
    2
}
