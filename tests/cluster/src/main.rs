//! Starts a test cluster for manual use: tests/cluster/up.

use std::process::ExitCode;

use stoker_test_cluster::{Client, Cluster, ControlPlane, Error, Options};

const USAGE: &str = "usage: up [--control-plane] [--wait]";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let is_known = |flag: &String| flag == "--control-plane" || flag == "--wait";
    let done = match arguments.split_first() {
        Some((command, flags)) if command == "up" && flags.iter().all(is_known) => {
            let keep = !has("--wait");
            if has("--control-plane") { up_control_plane(keep) } else { up(keep) }
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn up(keep: bool) -> Result<(), Error> {
    let cluster = Cluster::two_nodes_with(keep)?;
    let s3 = cluster.s3();
    println!("# S3 endpoint for pods: {}; for this machine: {}", s3.endpoint, s3.local_endpoint);
    println!("export AWS_ACCESS_KEY_ID={} AWS_SECRET_ACCESS_KEY={}", s3.access_key, s3.secret_key);
    print_usage(&cluster, keep);
    Ok(())
}

fn up_control_plane(keep: bool) -> Result<(), Error> {
    let options = Options { controllers: true, scheduler: true, keep };
    let plane = ControlPlane::start_with(options)?;
    print_usage(&plane, keep);
    Ok(())
}

/// Prints how to use and end the cluster. Unless it is kept, returns when standard input ends.
fn print_usage(client: &Client, keep: bool) {
    let kubectl = client.kubectl_command(&[]);
    println!("# kubectl: {}", kubectl.get_program().display());
    println!("export KUBECONFIG={}", client.kubeconfig().display());
    if keep {
        println!("# to end the cluster, run tests/cluster/down");
    } else {
        println!("# to end the cluster, press Ctrl-C or close standard input");
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    }
}
