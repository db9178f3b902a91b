// Command kube contains etcd, the Kubernetes servers, kubectl and a fake GPU plugin. One binary
// takes one run of the linker instead of eight. It runs the program whose name it is started by;
// scripts/fetch-cluster creates a symbolic link for each.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	switch name {
	case "etcd":
		etcdmain.Main(os.Args)
		return
	case "fake-gpu":
		if err := fakeGPU(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "fake-gpu:", err)
			os.Exit(1)
		}
		return
	}
	command := newCommand(name)
	if command == nil {
		fmt.Fprintf(os.Stderr, "kube: unknown program %s; start kube through a link named etcd, "+
			"fake-gpu, kubectl or like a Kubernetes server\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}

// newCommand creates the command of a Kubernetes program; nil if the name is unknown. It must not
// create the others: each registers flags and feature gates globally, and their names collide.
func newCommand(name string) *cobra.Command {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		return controllermanager.NewControllerManagerCommand()
	case "kube-proxy":
		return kubeproxy.NewProxyCommand()
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand()
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand()
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background())
	}
	return nil
}
