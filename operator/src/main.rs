//! Entry point of the operator.

use std::process::ExitCode;

use clap::Parser as _;
use stoker_operator::options::{Arguments, Command, LogFormat, Options};
use stoker_operator::serve::serve;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

fn main() -> ExitCode {
    let Command::Run(options) = Arguments::parse().command;
    if let Err(error) = log(&options) {
        eprintln!("error: --log-level: {error}");
        return ExitCode::from(2);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let served = match runtime {
        Ok(runtime) => runtime.block_on(run(*options)),
        Err(error) => Err(format!("cannot start the async runtime: {error}")),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<(), String> {
    let stop = watch::Sender::new(false);
    let failed = |error| format!("cannot install signal handlers: {error}");
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let serving = serve(options, stop.subscribe());
    let stopping = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        stop.send_replace(true);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        served = serving => served,
        () = stopping => Ok(()),
    }
}

fn log(options: &Options) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_new(&options.log_level);
    let filter = filter.map_err(|error| error.to_string())?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter);
    match options.log_format {
        LogFormat::Json => lines.json().flatten_event(true).init(),
        LogFormat::Text => lines.init(),
    }
    Ok(())
}
